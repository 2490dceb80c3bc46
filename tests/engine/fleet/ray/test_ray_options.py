from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from octavo import EngineConfig
from octavo.engine.fleet.ray import Layout, Options, ReplicaSpec, build_app
from octavo.engine.fleet.ray.layout import replica_options
from octavo.engine.server.settings import ServerSettings
from octavo.errors import InvalidRequest

SPEC = ReplicaSpec(model="fake", engine=EngineConfig(max_running=4, max_waiting=6), drain_timeout=3, save_timeout=5)


def test_arguments_become_settings(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "blue"\nkey = "sk-something-long"\ntenant = "blue"\n')
    options = Options(
        model="m",
        replicas="2-8",
        waiting_tokens=100.0,
        host="1MiB",
        redis="redis://there",
        snapshots="/s",
        api_keys=str(keys),
        admin_token="a-long-token",  # noqa: S106  # of nothing
        gpus=1.0,
    )
    spec, layout = options.spec(), options.layout()
    assert (layout.replicas, layout.most, layout.waiting_tokens, layout.gpus) == (2, 8, 100.0, 1.0)
    assert (spec.model, spec.snapshots, len(spec.server.keys)) == ("m", "/s", 1)
    assert (spec.engine.tiers, spec.engine.host_bytes, spec.engine.demotion) == (
        ("host", "redis"),
        2**20,
        "write_through",
    )


def test_a_spec_goes_to_other_processes() -> None:
    server = ServerSettings(model_names=("a",), admin_token="a-long-token")  # noqa: S106  # of nothing
    spec = ReplicaSpec(model="m", engine=EngineConfig(tiers=("host",), host_bytes=1), server=server, snapshots="s")
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301  # ours


@pytest.mark.parametrize(
    "arguments",
    [{"model": 3}, {"repicas": "2"}, {"replicas": "two"}, {"replicas": "3-2"}, {"replicas": "0"}, {"dtype": "int4"}],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        build_app(arguments)


@pytest.mark.parametrize(
    "wrong",
    [{"replicas": 0}, {"most": 1}, {"gateways": 0}, {"waiting_tokens": 0}, {"cpus": -1}, {"report_interval": 0.0}],
)
def test_a_wrong_layout_names_its_field(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        Layout(**wrong)  # type: ignore[arg-type]  # that is the point


def test_replicas_end_within_the_time_that_ray_gives_them() -> None:
    options = replica_options(SPEC, Layout())
    budget = SPEC.drain_timeout + SPEC.save_timeout + SPEC.engine.close_budget
    assert options["graceful_shutdown_timeout_s"] == budget
    most = options["max_ongoing_requests"]
    assert isinstance(most, int)
    assert most > SPEC.engine.max_running + SPEC.engine.max_waiting  # the engine says no, with its own words


def test_the_router_is_ours_unless_ray_is_asked_for() -> None:
    ours = replica_options(SPEC, Layout(routing="least_loaded"))["request_router_config"]
    rays = replica_options(SPEC, Layout(routing="ray"))["request_router_config"]
    assert isinstance(ours, RequestRouterConfig)
    assert isinstance(rays, RequestRouterConfig)
    assert ours.get_request_router_class().__name__ == "Router"
    assert ours.request_router_kwargs["policy"] == "least_loaded"
    assert "PowerOfTwo" in rays.get_request_router_class().__name__


def test_autoscaling_only_where_there_is_room() -> None:
    fixed, open_ = replica_options(SPEC, Layout(replicas=2, most=2)), replica_options(SPEC, Layout(replicas=2, most=5))
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    scaling = open_["autoscaling_config"]
    assert isinstance(scaling, AutoscalingConfig)
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.policy.policy_kwargs == {"tokens": 8192.0, "requests": 4.0}
    assert callable(scaling.policy.get_policy()(**scaling.policy.policy_kwargs))
