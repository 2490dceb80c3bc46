from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo import telemetry
from octavo.engine import cli, serve_cli
from octavo.engine.config import EngineConfig
from octavo.engine.server import command
from octavo.engine.server.command import Plan
from octavo.engine.server.lifecycle import Ending
from octavo.engine.server.options import parse_size, read_config, tiers_of
from octavo.engine.server.running import Address
from octavo.errors import InvalidRequest

ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch) -> PlanOf:
    return PlanOf(monkeypatch)


class PlanOf:
    """Runs the command line and catches what it would do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.delenv("OCTAVO_ADMIN_TOKEN", raising=False)
        monkeypatch.setattr(telemetry, "configure_logging", _nothing)

    def __call__(self, *arguments: str, went_well: bool = True) -> Plan:
        caught: list[Plan] = []

        def run(options: dict[str, object], engine: dict[str, object]) -> bool:
            caught.append(Plan(options, engine))
            return went_well

        self._monkeypatch.setattr(command, "run", run)
        result = CliRunner().invoke(cli.app, ["serve", *arguments], catch_exceptions=True)
        if isinstance(result.exception, InvalidRequest):
            raise result.exception
        assert result.exit_code == (0 if went_well else 1), result.output
        return caught[0]


def _nothing(form: str, level: str) -> None:
    """It would change the logging of all tests."""


def test_without_options_everything_is_as_the_engine_has_it(plan_of: PlanOf) -> None:
    plan = plan_of("smollm2")
    assert plan.options.model == "smollm2"
    assert plan.config == EngineConfig()
    assert (plan.options.host, plan.options.port, plan.options.uds) == ("127.0.0.1", 8000, None)
    assert plan.settings.model_names == ()
    assert plan.ending == Ending()
    assert len(plan.settings.keys) == 0


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--num-blocks", "77"], "num_blocks", 77),
        (["--block-size", "8"], "block_size", 8),
        (["--max-batch-tokens", "99"], "max_batch_tokens", 99),
        (["--max-running", "7"], "max_running", 7),
        (["--max-waiting", "5"], "max_waiting", 5),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--device", "cuda:1"], "device", "cuda:1"),
        (["--eviction-policy", "lru"], "eviction_policy", "lru"),
        (["--scheduling-policy", "fair"], "scheduling_policy", "fair"),
        (["--tier", "host=1MiB"], "host_bytes", 2**20),
        (["--tier", "disk=/a/b:c:2GB"], "disk_path", "/a/b:c"),
        (["--tier", "disk=/a/b:2GB"], "disk_bytes", 2_000_000_000),
        (["--tier", "redis", "--tier", "host=1MiB"], "tiers", ("redis", "host")),
    ],
)
def test_options_of_the_engine(plan_of: PlanOf, arguments: list[str], name: str, value: object) -> None:
    assert getattr(plan_of("smollm2", *arguments).config, name) == value


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--served-model-name", "a", "--served-model-name", "b"], "model_names", ("a", "b")),
        (["--admin-token", "twelve chars"], "admin_token", "twelve chars"),
        (["--snapshot-dir", "/snap"], "snapshot_dir", "/snap"),
        (["--tool-format", "hermes"], "tool_format", "hermes"),
        (["--max-body", "1MiB"], "max_body_bytes", 2**20),
        (["--max-connections", "10"], "max_connections", 10),
    ],
)
def test_options_of_the_app(plan_of: PlanOf, arguments: list[str], name: str, value: object) -> None:
    assert getattr(plan_of("smollm2", *arguments).settings, name) == value


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),  # noqa: S104
        (["--port", "0"], "port", 0),
        (["--uds", "/run/octavo"], "uds", "/run/octavo"),
        (["--root-path", "/llm"], "root_path", "/llm"),
        (["--restore", "/snap"], "restore", "/snap"),
        (["--otlp-endpoint", "http://collector"], "otlp_endpoint", "http://collector"),
        (["--log-level", "debug"], "log_level", "debug"),
    ],
)
def test_other_options(plan_of: PlanOf, arguments: list[str], name: str, value: object) -> None:
    assert getattr(plan_of("smollm2", *arguments).options, name) == value


def test_options_of_the_end(plan_of: PlanOf) -> None:
    plan = plan_of("smollm2", "--drain-timeout", "3", "--snapshot-on-exit", "/snap")
    assert (plan.ending.drain_timeout, plan.ending.snapshot) == (3.0, "/snap")


def test_files_that_are_named_are_read(plan_of: PlanOf, tmp_path: Path) -> None:
    keys, template = tmp_path / "keys.toml", tmp_path / "chat.jinja"
    keys.write_text('[[keys]]\nname = "a"\nkey = "key-of-a-1"\nquota = 0.25\nweight = 2.0\n')
    template.write_text("{{ messages }}")
    plan = plan_of("m", "--api-keys", str(keys), "--chat-template", str(template), "--scheduling-policy", "fair")
    caller = plan.settings.keys.caller("key-of-a-1")
    assert caller is not None
    assert caller.tenant == "a"
    assert plan.config.tenant_quotas == {"a": 0.25}
    assert plan.config.scheduling_options == {"weights": {"a": 2.0}}
    assert plan.chat_template == "{{ messages }}"
    for option in ("--api-keys", "--chat-template", "--config"):
        with pytest.raises(InvalidRequest, match="nowhere"):
            plan_of("m", option, str(tmp_path / "nowhere"))


def test_the_status_says_whether_all_went_well(plan_of: PlanOf) -> None:
    plan_of("m", went_well=False)


# the token


def test_a_random_token_is_made_for_this_machine_only(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    here, again = plan_of("m"), plan_of("m")
    assert here.admin_token is not None
    assert len(here.admin_token) >= 32
    assert here.admin_token != again.admin_token
    assert here.greeting(Address("127.0.0.1", 80)).endswith(f"http://127.0.0.1:80/ui#token={here.admin_token}")
    assert plan_of("m", "--host", "0.0.0.0").admin_token is None  # noqa: S104
    monkeypatch.setenv("OCTAVO_ADMIN_TOKEN", "from the environment")
    given = plan_of("m")
    assert given.admin_token == "from the environment"  # noqa: S105  # of this test
    assert "environment" not in given.greeting(Address("127.0.0.1", 80))


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("x", False)],
)
def test_who_can_connect(plan_of: PlanOf, host: str, is_local: bool) -> None:
    assert plan_of("m", "--host", host).options.is_local is is_local


@pytest.mark.parametrize("is_local", [False, True])
def test_a_server_that_is_open_to_everybody_says_so(
    plan_of: PlanOf, caplog: pytest.LogCaptureFixture, is_local: bool
) -> None:
    plan_of("m", "--host", "127.0.0.1" if is_local else "0.0.0.0", "--max-connections", "1").warn()  # noqa: S104
    assert any("open_to_everybody" in record.getMessage() for record in caplog.records) is not is_local


# the file


def test_a_file_gives_what_the_command_line_does_not(plan_of: PlanOf, tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(
        'model = "from-file"\nnum-blocks = 50\nblock_size = 4\ntier = ["host=1MiB"]\nport = 1234\n'
        '[engine]\npromotion = "wait"\nshadow_policies = ["lru"]\n[engine.tenant_quotas]\na = 0.5\n'
    )
    plan = plan_of("--config", str(file), "--num-blocks", "60")
    assert (plan.options.model, plan.options.port) == ("from-file", 1234)
    assert (plan.config.num_blocks, plan.config.block_size) == (60, 4)
    assert (plan.config.tiers, plan.config.promotion) == (("host",), "wait")
    assert (plan.config.shadow_policies, plan.config.tenant_quotas) == (("lru",), {"a": 0.5})
    assert plan_of("other", "--config", str(file)).options.model == "other"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("num_blocs = 3", "num_blocs"),
        ("config = 'other'", "config"),
        ("[engine]\nnum_blocks = 3", "num_blocks"),
        ("[engine]\nnum_blocs = 3", "num_blocs"),
        ("engine = 3", "a table"),
        ("model = ", "no TOML"),
        ("[engine]\npromotion = 'never'", "promotion"),
    ],
)
def test_a_file_that_is_wrong_is_refused(plan_of: PlanOf, tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=complaint):
        plan_of("m", "--config", str(file))


def test_every_option_may_stand_in_a_file(tmp_path: Path) -> None:
    names = [name for name in serve_cli.serve.__annotations__ if name not in {"context", "config", "return"}]
    file = tmp_path / "octavo.toml"
    file.write_text("".join(f'{name} = "1"\n' for name in names))
    assert set(read_config(str(file), frozenset(names)).options) == set(names)


def test_every_option_has_a_sentence() -> None:
    text = ANSI.sub("", CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output)
    for name in serve_cli.serve.__annotations__:
        if name not in {"context", "return", "model"}:
            assert re.search(rf"--{name.replace('_', '-')} .*\w+ \w+", text), name


# sizes and tiers


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "K", "KB", "KiB", "M", "MiB", "GB", "gib", "T", "TiB"]))
def test_sizes(number: int, unit: str) -> None:
    factor = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}[unit.upper().rstrip("B").rstrip("I")]
    if "i" in unit.lower():
        factor = {1000: 2**10, 1000**2: 2**20, 1000**3: 2**30, 1000**4: 2**40}[factor]
    assert parse_size(f"{number}{unit}") == pytest.approx(number * factor, rel=1e-12)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 PB", "inf", "1.GiB", "1iB", "1 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize("spec", ["host", "host=", "disk", "disk=/a", "redis=redis://x", "host=much"])
def test_what_is_no_tier(spec: str) -> None:
    with pytest.raises(InvalidRequest):
        tiers_of([spec])


# without the extra


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "octavo.engine.server.command")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "octavo.engine.server.running", raising=False)
    monkeypatch.delitem(sys.modules, "octavo.engine.server.lifecycle", raising=False)
    result = CliRunner().invoke(cli.app, ["serve", "m"])
    assert isinstance(result.exception, InvalidRequest)
    assert "pip install 'octavo[server]'" in str(result.exception)


@pytest.mark.parametrize(("hard", "is_enough"), [(4096, True), (resource.RLIM_INFINITY, True), (512, False)])
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, hard: int, is_enough: bool
) -> None:
    limits = [256, hard]

    def get(what: int) -> tuple[int, int]:
        return limits[0], limits[1]

    def put(what: int, new: tuple[int, int]) -> None:
        assert new[0] <= hard or hard == resource.RLIM_INFINITY
        limits[:] = new

    monkeypatch.setattr(resource, "getrlimit", get)
    monkeypatch.setattr(resource, "setrlimit", put)
    assert command._make_room_for(1156) is is_enough
    assert limits == [1156 if is_enough else 512, hard]
    assert command._make_room_for(100)
    assert limits[0] >= 512  # it is never lowered
