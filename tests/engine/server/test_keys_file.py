"""The file of API keys: what it says is what is let in, and nobody learns a key from it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from octavo.engine.server.access import Caller, Keys, digest
from octavo.engine.server.keys_file import load_keys
from octavo.errors import InvalidRequest
from octavo.telemetry.logging import get_logger

SECRET = "sk-a-long-secret"  # noqa: S105  # of nothing


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_in_the_clear_and_a_digest_open_the_same_door(keys_file: Path) -> None:
    plain = load_keys(write(keys_file, f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n'))
    hashed = hashlib.sha256(SECRET.encode()).hexdigest()
    digested = load_keys(write(keys_file, f'[[keys]]\nname = "a"\nsha256 = "{hashed.upper()}"\n'))
    assert plain == digested
    assert plain.caller(SECRET) == Caller(tenant="a", name="a")
    assert plain.caller(SECRET + " ") is None
    assert SECRET not in repr(plain)


def test_all_settings_arrive(keys_file: Path) -> None:
    text = f"""
    [[keys]]
    name = "a"
    key = "{SECRET}"
    priority = -3
    max_concurrent = 2
    quota = 0.25
    weight = 2

    [[keys]]
    name = "b"
    key = "{SECRET}-b"
    tenant = "research"
    quota = 0.5

    [[keys]]
    name = "c"
    key = "{SECRET}-c"
    tenant = "research"
    """
    keys = load_keys(write(keys_file, text))
    assert keys.caller(SECRET) == Caller("a", -3, 2, "a")
    assert keys.caller(SECRET + "-b") == Caller("research", name="b")
    assert keys.caller(SECRET + "-c") == Caller("research", name="c")
    assert keys.quotas == {"a": 0.25, "research": 0.5}
    assert keys.weights == {"a": 2.0}
    assert len(keys) == 3


DIGEST = "0" * 64
KEY = f'key = "{SECRET}"'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"[[keys]]\n{KEY}", "name"),
        ('[[keys]]\nname = "a"', "'a' needs a key or a sha256"),
        (f'[[keys]]\nname = "a"\n{KEY}\nsha256 = "{"0" * 64}"', "not both"),
        ('[[keys]]\nname = "a"\nsha256 = "abc"', r"\$\.keys\[0\]\.sha256"),
        ('[[keys]]\nname = "a"\nkey = "short"', "8 characters"),
        (f'[[keys]]\nname = "a"\nkey = " {SECRET}"', "none around"),
        (f'[[keys]]\nname = "a"\nkey = "ü{SECRET}"', "ASCII"),
        (f'[[keys]]\nname = ""\n{KEY}', r"\$\.keys\[0\]\.name"),
        (f'[[keys]]\nname = "a"\n{KEY}\ntenants = "b"', "tenants"),
        (f'[[keys]]\nname = "a"\n{KEY}\npriority = 1.5', "priority"),
        (f'[[keys]]\nname = "a"\n{KEY}\nmax_concurrent = 0', "max_concurrent"),
        (f'[[keys]]\nname = "a"\n{KEY}\nquota = 1.5', "quota"),
        (f'[[keys]]\nname = "a"\n{KEY}\nweight = 0', "weight"),
        (f'[[keys]]\nname = "a"\n{KEY}\n' * 2, "the name 'a' is there twice"),
        (f'[[keys]]\nname = "a"\n{KEY}\n[[keys]]\nname = "b"\n{KEY}', "'a' and 'b' have the same key"),
        (
            f'[[keys]]\nname = "a"\n{KEY}\nquota = 0.6\n[[keys]]\nname = "b"\nkey = "{SECRET}2"\nquota = 0.6',
            "1.2 together",
        ),
        (
            f'[[keys]]\nname="a"\ntenant="b"\n{KEY}\nquota=0.6\n[[keys]]\nname="b"\nsha256="{DIGEST}"\nquota=0.5',
            "tenant 'b' disagree on quota",
        ),
        ("[[keys]", "malformed"),
        (f"[[keys]]\nname = a\n{KEY}", "line 2"),
        ("", "keys"),
    ],
)
def test_what_is_wrong_is_said_and_no_key_with_it(text: str, told: str, keys_file: Path) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        load_keys(write(keys_file, text))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_there_or_no_text_is_told(keys_file: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: FileNotFoundError"):
        load_keys(keys_file)
    keys_file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="no UTF-8"):
        load_keys(keys_file)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)])
def test_a_file_that_everybody_can_read_is_warned_of(mode: int, warned: bool, keys_file: Path) -> None:
    with capture_logs() as logs:
        load_keys(write(keys_file, f'[[keys]]\nname = "a"\n{KEY}', mode), get_logger("test"))
    structlog.reset_defaults()  # else the loggers of all later tests go through structlog
    assert [log["event"] for log in logs] == ["keys_file_is_readable_by_everybody"] * warned
    assert SECRET not in str(logs)


def test_keys_with_and_without_a_tenant_do_not_go_together() -> None:
    """Who has none may name one, and it must not be somebody's."""
    callers = {digest("one"): Caller("a"), digest("two"): Caller()}
    with pytest.raises(InvalidRequest, match="tenant"):
        Keys(callers)
