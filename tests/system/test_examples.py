"""Every example runs, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
STARTS = ("stream", "chat", "samples", "beams", "fork", "explain", "hit", "client", "cache")


def test_quickstart() -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)  # noqa: S603  # our own file
    lines = [line for line in done.stdout.splitlines() if line]
    assert any("Paris" in line for line in lines)
    found = {start: [line for line in lines if line.startswith(f"{start}:")] for start in STARTS}
    assert all(found.values()), found
    before, after = found["explain"]
    assert "cached_tokens=0," in before
    assert "cached_tokens=0," not in after
    assert not found["hit"][0].startswith("hit: 0 of")
    assert "cached_tokens=0" not in found["client"][0]
    assert "census: Census(" in done.stdout
    assert "held=0" in lines[-1]
    cells = (EXAMPLES / "quickstart.py").read_text().count("\n# %% ")
    assert cells == 8


def test_examples_are_told_of_in_the_readme() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert "examples/quickstart.py" in readme
    assert "examples/serving_app" in readme
