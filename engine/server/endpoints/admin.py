"""What operators look at and do to the cache. All of it needs the admin token; ``own_explain`` alone is for clients."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import ASGIApp

from ...choosing import EVICTION_POLICIES
from .. import operations as ops
from ..call import Call
from ..endpoint import json_response
from ..errors import NOT_FOUND, ApiError, invalid
from ..params import tenant_of
from ..wire import admin, operations

T = TypeVar("T", bound=msgspec.Struct)

# looking


async def stats(call: Call) -> ASGIApp:
    """All counters of the engine."""
    return json_response(ops.stats(call.service.engine.stats()))


async def cache(call: Call) -> ASGIApp:
    """The cache at this moment; cheap enough for once a second."""
    query = _query(call, admin.CacheQuery)
    view = await call.service.engine.cache_view(max_nodes=query.nodes, text=query.text)
    return json_response(ops.shown(view, takes_snapshots=call.service.settings.snapshot_dir is not None))


async def explain(call: Call) -> ASGIApp:
    """How much of a prompt a request would find, in which tier, and why not more."""
    form = call.read(operations.ExplainForm)
    prompt = ops.prompt_of(form, opens_turn=True)
    found = await call.service.engine.explain(prompt, tenant=form.tenant, others=form.others is True)
    return json_response(ops.explained(found))


async def own_explain(call: Call) -> ASGIApp:
    """How much of a prompt a request of this client would find, and why not more.

    Looks at what was stored for the same tenant only.
    """
    form = call.read(operations.OwnExplainForm)
    call.check_model(form.model)
    salted, own = tenant_of(call.caller, form.cache_salt), call.caller.tenant
    prompt = ops.prompt_of(form, opens_turn=True)
    found = await call.service.engine.explain(prompt, tenant=salted if own is None else own)
    return json_response(ops.own_explained(found))


async def requests(call: Call) -> ASGIApp:
    """What is under way. An ``id`` is what clients know behind the ``chatcmpl-`` or ``cmpl-`` of their answer."""
    found = [operations.RequestState(*view) for view in call.service.engine.requests()]
    return json_response(operations.RequestList(found))


# keeping and forgetting


async def pin(call: Call) -> ASGIApp:
    """Keep a prefix on the device, computing it first if need be."""
    form = call.read(operations.PinForm)
    kept = await call.engine.pin(ops.prompt_of(form), ttl=form.ttl, priority=form.priority, tenant=form.tenant)
    return json_response(operations.PinState(kept.pin_id, kept.tokens, form.ttl, kept.tenant))


async def pins(call: Call) -> ASGIApp:
    """Prefixes that are pinned."""
    engine = call.service.engine
    return json_response(operations.PinList([ops.pin_state(pin, engine.now()) for pin in engine.pins()]))


async def unpin(call: Call) -> ASGIApp:
    """Let a pinned prefix be evicted again."""
    engine, wanted = call.service.engine, call.path_params["id"]
    found = next((pin for pin in engine.pins() if str(pin.pin_id) == wanted), None)
    if found is None or not await engine.unpin(found):
        raise _unknown("pin", wanted)
    return json_response(operations.Unpinned(found.pin_id))


async def evict(call: Call) -> ASGIApp:
    """Forget a prefix and all that goes on from it; what is in use or pinned stays."""
    form = call.read(operations.EvictForm)
    gone = await call.service.engine.evict(ops.prompt_of(form), tenant=form.tenant, tiers=form.tiers is not False)
    return json_response(operations.EvictedBlocks(*gone))


# who decides


async def policies(call: Call) -> ASGIApp:
    """Which policies decide."""
    return json_response(_policies(call))


async def set_policy(call: Call) -> ASGIApp:
    """Let another eviction policy say what goes, while requests go on."""
    form = call.read(operations.PolicyForm)
    before = await call.service.engine.set_eviction_policy(form.eviction_policy)
    return json_response(_policies(call, before))


async def shadows(call: Call) -> ASGIApp:
    """What other policies would have found."""
    return json_response(_shadows(call))


async def add_shadow(call: Call) -> ASGIApp:
    """Let one more policy run beside the one that decides."""
    call.service.engine.add_shadow(call.read(operations.ShadowForm).policy)
    return json_response(_shadows(call))


async def remove_shadow(call: Call) -> ASGIApp:
    """End a shadow."""
    if not call.service.engine.remove_shadow(call.path_params["policy"]):
        raise _unknown("shadow", call.path_params["policy"])
    return json_response(_shadows(call))


# requests and the end


async def abort(call: Call) -> ASGIApp:
    """Abort a request: its client is told so by an error."""
    wanted = call.path_params["id"]
    if not call.service.engine.abort(wanted):
        raise _unknown("request", wanted)
    return json_response(operations.Aborted(wanted))


async def drain(call: Call) -> ASGIApp:
    """Take no new requests any more, and wait until none is left. There is no way back."""
    form, engine = call.read(operations.DrainForm), call.service.engine
    call.service.is_draining = True
    return json_response(operations.Drained(await engine.drain(form.timeout)))


def _policies(call: Call, before: str | None = None) -> operations.Policies:
    stats = call.service.engine.stats()
    cache = stats.cache
    installed = EVICTION_POLICIES.names()
    return operations.Policies(cache.policy, cache.policy_set_aside, stats.scheduling_policy, installed, before)


def _shadows(call: Call) -> operations.ShadowList:
    reports = call.service.engine.shadows()
    found = [operations.Shadow(report.policy, report.uses, report.hits, report.live_hits) for report in reports]
    return operations.ShadowList(found)


def _query(call: Call, form: type[T]) -> T:
    values = dict(parse_qsl(call.scope["query_string"].decode("latin-1"), keep_blank_values=True))
    try:
        return msgspec.convert(values, form, strict=False)
    except msgspec.ValidationError as error:
        raise invalid(str(error), str(error).rpartition("$.")[2].rstrip("`") or None) from error


def _unknown(kind: str, name: str) -> ApiError:
    return ApiError(HTTPStatus.NOT_FOUND, f"there is no {kind} {name!r:.80}", kind=NOT_FOUND)
