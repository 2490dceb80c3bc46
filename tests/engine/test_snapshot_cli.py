"""``octavo snapshot``: what a user types, and what they see."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.engine import snapshot_cli
from octavo.engine.model.loader import LoadedModel
from octavo.engine.snapshot_cli import snapshot_app
from octavo.engine.testing import FakeCodec, FakeRunner
from octavo.errors import InvalidRequest, StorageError
from octavo.storage.base import Meta
from octavo.storage.files.filesystem import Filesystem
from octavo.storage.snapshot.files import open_snapshot
from octavo.storage.snapshot.writer import SnapshotSettings, SnapshotWriter
from octavo.storage.testing.contract import SampleBlocks

SAMPLES = SampleBlocks()
SHELF, OTHER = SAMPLES.shelf(), SAMPLES.shelf("alice")
RECORDS = SAMPLES.chain(SHELF, 3, meta=Meta(hits=4))
TOKENS = array("i", b"".join(record.head.tokens for record in RECORDS)).tolist()


@pytest.fixture
def snap(tmp_path: Path) -> Path:
    writer = SnapshotWriter(tmp_path / "snap", SAMPLES.geometry, SnapshotSettings(free_floor=0, wall=lambda: 0.0))
    writer.begin()
    writer.add(SHELF, RECORDS)
    writer.add(OTHER, SAMPLES.chain(OTHER, 2))
    writer.commit()
    return tmp_path / "snap"


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(snapshot_app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def count(location: Path) -> int:
    snapshot = open_snapshot(Filesystem(), location, SAMPLES.geometry)
    snapshot.close()
    return len(snapshot.tree)


def test_import_then_create_and_compact(snap: Path, tmp_path: Path) -> None:
    assert run("import", snap, tmp_path / "disk", "--bytes", 1 << 30).stdout == f"5 blocks to {tmp_path / 'disk'}\n"
    assert run("create", tmp_path / "disk", tmp_path / "again").stdout == f"5 blocks to {tmp_path / 'again'}\n"
    assert count(tmp_path / "again") == 5
    assert run("compact", tmp_path / "disk").stdout.endswith("bytes given back\n")
    for place in ("disk", "again"):
        assert ": 0 problems" in run("verify", tmp_path / place).stdout


def test_inspect_shows_digests_and_no_secrets(snap: Path) -> None:
    shown = run("inspect", snap).stdout
    assert "5 blocks of 4 tokens (20 tokens)" in shown
    assert "1970-01-01T00:00:00+00:00" in shown
    assert SHELF.namespace.hex()[:16] in shown
    assert RECORDS[-1].head.name.hex()[:16] in shown
    assert "alice" not in shown
    assert "alice" not in run("inspect", snap, "--json").stdout


def test_inspect_speaks_to_programs(snap: Path) -> None:
    [report] = json.loads(run("inspect", snap, "--json", "--prefixes", 1).stdout)
    assert (report["kind"], report["version"], report["blocks"], report["created"]) == ("snapshot", 1, 5, 0.0)
    assert report["identity"] == [["weights", "sample"]]
    assert report["longest"][0]["tokens"] == 12
    assert report["hottest"] == [report["longest"][0]]


def test_verify_lists_what_is_bad(snap: Path) -> None:
    assert run("verify", snap).exit_code == 0
    path = next(snap.rglob("*.seg"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = run("verify", snap)
    assert result.exit_code == 1
    assert "blocks-00000.seg: the checksum is wrong" in result.stdout
    assert result.stdout.endswith("2 problems\n")


def test_export_by_tokens_text_and_block(snap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Words(FakeCodec):
        def encode(self, text: str) -> list[int]:
            return TOKENS[:4] if text == "hello" else []

    target = tmp_path / "one"
    tokens = ",".join(map(str, TOKENS[:8]))
    assert run("export", snap, target, "--tokens", tokens).stdout == f"2 blocks to {target}\n"
    assert run("export", snap, target, "--block", RECORDS[2].head.name.hex()[:16]).stdout.startswith("3 blocks")
    with pytest.raises(StorageError, match="not one whole block"):
        run("export", snap, target, "--tokens", tokens, "--tenant", "bob")
    monkeypatch.setattr(snapshot_cli, "load", lambda _: LoadedModel(FakeRunner(), Words()))
    assert run("export", snap, target, "--text", "hello", "--model", "any").stdout.startswith("1 block to")
    monkeypatch.setattr(snapshot_cli, "load", lambda _: LoadedModel(FakeRunner(), None))
    with pytest.raises(InvalidRequest, match="without a tokenizer"):
        run("export", snap, target, "--text", "hello", "--model", "any")
    assert count(target) == 1


def test_export_wants_exactly_one_prefix(snap: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--tokens", "1", "--block", "ab"], ["--text", "x", "--tokens", "1"]):
        with pytest.raises(InvalidRequest, match="exactly one"):
            run("export", snap, tmp_path / "one", *arguments)
    with pytest.raises(InvalidRequest, match="takes numbers"):
        run("export", snap, tmp_path / "one", "--tokens", "1,two")
    with pytest.raises(InvalidRequest, match="needs --model"):
        run("export", snap, tmp_path / "one", "--text", "hello")
    assert not (tmp_path / "one").exists()


def test_erase(snap: Path) -> None:
    assert run("erase", snap, "--tenant", "alice").stdout == "2 blocks erased\n"
    assert run("erase", snap, "--tenant", "alice").stdout == "0 blocks erased\n"
    assert count(snap) == 3


def test_keys_come_from_files(snap: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    result = run("verify", snap, "--key-file", tmp_path / "key")
    assert result.exit_code == 1
    assert "signed and no key is set, or the other way round" in result.stdout
    (tmp_path / "key").write_bytes(b"k" * 65)
    with pytest.raises(InvalidRequest, match="16 to 64 bytes"):
        run("verify", snap, "--key-file", tmp_path / "key")
    with pytest.raises(StorageError, match="cannot be read"):
        run("verify", snap, "--key-file", tmp_path / "none")


def test_places_that_hold_nothing_are_said(tmp_path: Path) -> None:
    for command in ("inspect", "verify", "compact"):
        with pytest.raises(StorageError):
            run(command, tmp_path / "none")


def test_what_is_left_out_is_said(snap: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 16)
    said = run("create", snap, tmp_path / "copy", "--key-file", tmp_path / "key").stdout
    assert said.startswith("0 blocks")
    assert "5 blocks left out" in said
