"""What replicas say of themselves, on its way as plain data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.routing import FleetView, ReplicaStatus

counts = st.integers(0, 2**53)


@given(
    st.builds(
        ReplicaStatus,
        counts,
        counts,
        counts,
        counts,
        counts,
        digest=st.none() | st.binary(),
        kv_events=st.none() | st.text(),
        block_tokens=counts,
        namespace=st.text(),
        is_draining=st.booleans(),
    )
)
def test_it_comes_back_from_plain_data(status: ReplicaStatus) -> None:
    assert ReplicaStatus.from_dict(status.to_dict()) == status


def test_what_is_missing_has_its_default_and_what_is_unknown_is_ignored() -> None:
    assert ReplicaStatus.from_dict({"running": 3, "mood": "good"}) == ReplicaStatus(running=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"running": -1},
        {"running": "3"},
        {"running": 1.5},
        {"running": 2**63},
        {"waiting_tokens": 10**400},
        {"digest": 7},
        {"is_draining": 1},
        {"namespace": None},
    ],
)
def test_other_types_and_numbers_that_are_no_counts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no status of a replica"):
        ReplicaStatus.from_dict(wrong)


def test_what_is_not_refused_can_be_kept_in_books() -> None:
    view = FleetView(clock=lambda: 0.0)
    view.join("a")
    most = 2**53
    view.report("a", ReplicaStatus.from_dict(dict.fromkeys(("running", "waiting_tokens", "total_blocks"), most)))
    assert view.load("a") == view.requests[0] == most
