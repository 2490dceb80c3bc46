"""The warm restart example and benchmark run, as their first lines say, and show a warm restart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)  # noqa: S603  # our own file
    return done.stdout


def test_a_killed_engine_answers_the_same_without_computing_its_documents_again() -> None:
    shown = _run("warm_restart/warm_restart.py", "--documents", "2", "--tokens", "160")
    rows = re.findall(r"^ +(\d) +(\d+) +(\d+) .*x  (.*)$", shown, re.MULTILINE)
    assert [(number, saved, answer) for number, _, saved, answer in rows] == [
        ("1", "160", "the same"),
        ("2", "160", "the same"),
    ]
    assert all(int(tokens) > 160 for _, tokens, *_ in rows)
    assert shown.splitlines()[-1].startswith("320 of ")


@pytest.mark.slow
def test_the_benchmark_measures_a_restart_and_judges_it() -> None:
    shown = json.loads(_run("benchmarks/warm_restart.py", "--quick", "--json", "--tokens", "97"))
    assert [each["page_cache"] for each in shown["again"]] == ["cold", "warm"]
    assert all(each["loaded_tokens"] == 96 for each in shown["again"])
    assert all(each["token"] == shown["first"]["token"] for each in shown["again"])
    assert {each["kind"] for each in shown["openings"]} == {"disk tier", "snapshot"}
    assert all(re.match(r"(met   |missed): ", line) for line in shown["verdicts"])
    assert any("the first token is the same" in line for line in shown["verdicts"] if line.startswith("met"))
