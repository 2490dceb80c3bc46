"""``/metrics`` of a fleet: one exposition, in which every replica is to be told apart."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.fleet.merging import merged
from octavo.telemetry.metrics.catalogue import CATALOGUE
from octavo.telemetry.metrics.exposition import Collector, Readings
from octavo.telemetry.metrics.fleet import FLEET_CATALOGUE, MOST_REPLICAS, OTHER, ROUTED, FleetMeasures, Sent
from octavo.telemetry.metrics.http import HTTP_CATALOGUE
from octavo.tests.engine.fleet.gateway_rig import COMPLETIONS, FORM, DoorOf, Ordered

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(text: str) -> Series:
    """All samples. None is there twice, and no family is."""
    found: Series = {}
    families = list(text_string_to_metric_families(text))
    assert max(Counter(family.name for family in families).values()) == 1
    for family in families:
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.mark.asyncio
async def test_every_family_of_every_replica_is_there_once(door_of: DoorOf) -> None:
    async with door_of(count=3, policy=Ordered()) as door:
        await door.post(COMPLETIONS, **FORM)
        await door.post(COMPLETIONS, **FORM)
        answer = await door.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = answer.text
    found = series(text)
    names = {family.name for family in text_string_to_metric_families(text)}
    shown = {metric.name.removesuffix("_total") for metric in (*CATALOGUE, *HTTP_CATALOGUE, *FLEET_CATALOGUE)}
    infos = {metric.name for metric in CATALOGUE if metric.kind == "info"}
    assert {name.removesuffix("_info") for name in names} == shown | infos
    for replica, count in (("r0", 2.0), ("r1", 0.0), ("r2", 0.0)):
        assert value(found, "octavo_requests_submitted_total", replica=replica) == count
    routes = {"route": COMPLETIONS, "method": "POST", "status": "200"}
    assert value(found, "octavo_http_requests_total", replica="r0", **routes) == 2
    assert value(found, "octavo_http_requests_total", **routes) == 2
    assert value(found, "octavo_fleet_requests_total", replica="r0", reason="turn") == 2
    assert value(found, "octavo_fleet_prompt_tokens_total", replica="r0") == 50
    assert value(found, "octavo_fleet_matched_tokens_total", replica="r0") == 24
    assert value(found, "octavo_fleet_routing_seconds_count") == 2


def test_what_is_malformed_is_left_out_and_the_rest_is_not() -> None:
    good = b"# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n"
    other = b"# HELP a_total A.\n# TYPE a_total gauge\na_total 5.0\n"
    bad = b'a_total{x="1 oh no\n'
    text = merged({"r0": good, "r1": bad, "r2": b"\xff", "r3": good, "r4": other}, []).decode()
    found = series(text)
    assert found == {
        ("a_total", frozenset({("replica", "r0")})): 1.0,
        ("a_total", frozenset({("replica", "r3")})): 1.0,
    }


def test_a_label_that_a_replica_has_given_stays() -> None:
    text = merged({"r0": b'# TYPE a gauge\na{replica="own"} 1.0\na{b="\\"\\n"} 2.0\n'}, []).decode()
    assert series(text) == {
        ("a", frozenset({("replica", "own")})): 1.0,
        ("a", frozenset({("replica", "r0"), ("b", '"\n')})): 2.0,
    }


def test_replicas_that_come_and_go_do_not_become_labels_without_end() -> None:
    measures = FleetMeasures()
    for number in range(MOST_REPLICAS + 50):
        measures.sent(Sent(f"r{number}", "load", 0, 1))
        measures.lost(f"r{number}")
    measures.lost(None)
    numbers = measures.readings().numbers
    assert all(len(labels) <= MOST_REPLICAS + 1 for labels in numbers.values())
    assert numbers[ROUTED][OTHER, "load"] == 50
    assert b"octavo_fleet" in merged({}, [Collector(measures.readings, catalogue=FLEET_CATALOGUE)])


def test_what_was_not_counted_is_shown_without_samples() -> None:
    text = merged({}, [Collector(Readings, catalogue=FLEET_CATALOGUE)]).decode()
    assert {family.name for family in text_string_to_metric_families(text)} == {
        metric.name.removesuffix("_total") for metric in FLEET_CATALOGUE
    }
