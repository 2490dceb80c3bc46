"""Choosing: from the name of an eviction policy to one that can take over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from ..errors import ContractBroken, InvalidRequest, describe
from ..plugins import PluginGroup
from ..policies.eviction.base import EvictionPolicy
from ..policies.eviction.priority_ttl import PriorityTtl
from .kv.quotas import Quotas
from .kv.shares import TenantShares

EVICTION_POLICIES = PluginGroup("octavo.eviction_policies", EvictionPolicy)

T = TypeVar("T")


class Chosen(NamedTuple):
    """A policy, made, and what it is."""

    policy: EvictionPolicy
    """One that honours retention: the class that was chosen ranks within a priority."""
    kind: str
    """``package.module:Class``. States are for policies of the same kind ..."""
    major: int
    """... that were written for the same major version of the contract."""


def chosen(spec: str, num_blocks: int, quotas: Quotas | None = None) -> Chosen:
    """The policy that ``spec`` names, an entry point or ``package.module:Class``, for a pool of ``num_blocks``; with
    ``quotas``, one for each group of tenants.

    :raises PluginError: when it is unknown, cannot be imported, is no policy or cannot be made.
    """
    cls = EVICTION_POLICIES.resolve(spec)

    def ranking(capacity: int) -> EvictionPolicy:
        return PriorityTtl(capacity, cls)

    policy = made(
        lambda: TenantShares(num_blocks, ranking, quotas) if quotas is not None else ranking(num_blocks), spec
    )
    return Chosen(policy, f"{cls.__module__}:{cls.__qualname__}", cls.api_version[0])


def made(make: Callable[[], T], name: str) -> T:
    """What ``make`` makes of a plug-in.

    :raises ContractBroken: when it raises.
    """
    try:
        return make()
    except Exception as error:
        raise ContractBroken(f"plug-in {name!r} could not be made: {describe(error)}") from error


def made_with(cls: Callable[..., T], spec: str, options: Mapping[str, object], setting: str = "options") -> T:
    """The policy ``cls``, that ``spec`` names, made with ``options`` as keyword arguments.

    ``setting``: what messages call them.

    :raises InvalidRequest: when it has no such settings, or refuses their values.
    :raises ContractBroken: when it raises anything else.
    """
    parameters = inspect.signature(cls).parameters.values()
    known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    if not takes_all and (unknown := sorted(set(options) - set(known))):
        taken = ", ".join(known) or "none"
        raise InvalidRequest(f"{setting}: {spec!r} knows no {', '.join(unknown)}; its settings: {taken}")
    try:
        return cls(**options)
    except InvalidRequest as error:
        raise InvalidRequest(f"{setting}: {error}") from error
    except (TypeError, ValueError) as error:
        if not options:
            raise ContractBroken(f"plug-in {spec!r} could not be made: {describe(error)}") from error
        raise InvalidRequest(f"{setting}: {spec!r} refuses them: {describe(error)}") from error
    except Exception as error:
        raise ContractBroken(f"plug-in {spec!r} could not be made: {describe(error)}") from error
