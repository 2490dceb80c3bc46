"""ResponseStore against a plain list: bounded for each tenant, the oldest go first."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.server.endpoints.response_params import unwritten
from octavo.engine.server.response_store import ResponseStore, StoredResponse
from octavo.engine.server.wire.response_form import ResponseForm

TENANTS = st.sampled_from([None, "ann", "bob"])
IDS = st.integers(0, 5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), TENANTS, st.integers(1, 12)),
        st.tuples(st.just("delete"), TENANTS, IDS),
        st.tuples(st.just("erase"), TENANTS, IDS),
    ),
    max_size=40,
)


def stored(store: ResponseStore, number: int, size: int, owner: str | None = None) -> StoredResponse:
    response = unwritten(ResponseForm(input="abc"), "fake", f"resp_{number}", 0)
    return StoredResponse(response, (), size, store.owner(owner))


@given(STEPS, st.integers(0, 4), st.integers(1, 20))
def test_like_a_list(steps: list[tuple[str, str | None, int]], max_count: int, max_bytes: int) -> None:
    store = ResponseStore(max_count, max_bytes)
    model: dict[str | None, list[StoredResponse]] = defaultdict(list)
    for number, (what, tenant, value) in enumerate(steps):
        shelf = model[tenant]
        if what == "put":
            each = stored(store, number, value, tenant)
            store.put(tenant, each)
            if max_count and value <= max_bytes:
                shelf.append(each)
            while len(shelf) > max_count or sum(kept.size for kept in shelf) > max_bytes:
                shelf.pop(0)
        elif what == "delete":
            response_id = shelf[value % len(shelf)].response.id if shelf else "resp_none"
            assert store.delete(tenant, response_id) is bool(shelf)
            model[tenant] = [kept for kept in shelf if kept.response.id != response_id]
        else:
            assert store.erase(tenant) == len(shelf)
            model[tenant] = []
        assert len(store) == sum(map(len, model.values()))
        for owner, kept_here in model.items():
            for kept in kept_here:
                assert store.get(owner, kept.response.id) is kept
                for other in {None, "ann", "bob"} - {owner}:
                    assert store.get(other, kept.response.id) is None


def test_a_tenant_cannot_crowd_out_another() -> None:
    store = ResponseStore(2, 100)
    store.put("ann", stored(store, 0, 10))
    for number in range(1, 50):
        store.put("bob", stored(store, number, 50))
    assert store.get("ann", "resp_0") is not None
    assert store.get("bob", "resp_49") is not None
    assert store.get("bob", "resp_47") is None


def test_what_ran_as_a_tenant_is_erased_wherever_it_lies_and_if_it_is_complete_only_afterwards() -> None:
    store = ResponseStore(10, 100)
    named, others, late = stored(store, 0, 1, "salt"), stored(store, 1, 1, "other"), stored(store, 2, 1, "salt")
    store.put(None, named)
    store.put(None, others)
    assert store.erase("salt") == 1
    store.put(None, late)
    assert (store.get(None, "resp_0"), store.get(None, "resp_2")) == (None, None)
    assert store.get(None, "resp_1") is others
    after = stored(store, 3, 1, "salt")
    store.put(None, after)
    assert store.get(None, "resp_3") is after
