"""Every example runs, as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart() -> None:
    command = [sys.executable, str(EXAMPLES / "quickstart.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)  # noqa: S603  # our own file
    lines = [line for line in done.stdout.splitlines() if line]
    assert any("Paris" in line for line in lines)
    for start in ("stream:", "chat:", "samples:", "beams:", "fork:", "cache:"):
        assert any(line.startswith(start) for line in lines), start
    assert "census: Census(" in done.stdout
    assert "held=0" in lines[-1]
