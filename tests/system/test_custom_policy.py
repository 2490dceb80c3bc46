"""The example of a policy in a package of its own: it is built and installed as users would, its tests pass, and an
engine finds it by its name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy"


class Installed:
    """A copy of the example, and where its package was installed to."""

    def __init__(self, folder: Path) -> None:
        self.source, self._site = folder / "source", folder / "site"
        shutil.copytree(EXAMPLE, self.source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
        self.python("-m", "pip", "install", *offline, "--target", str(self._site), str(self.source))

    def python(self, *arguments: str) -> str:
        """What an interpreter prints that has it installed."""
        environment = {**os.environ, "PYTHONPATH": str(self._site), "PIP_NO_INPUT": "1"}
        command = [sys.executable, *arguments]
        done = subprocess.run(  # noqa: S603  # our own files
            command, cwd=self.source, env=environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("custom_policy"))


def test_its_own_tests_pass(installed: Installed) -> None:
    shown = installed.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "tests")
    assert (passed := re.search(r"^(\d+) passed", shown, re.MULTILINE)), shown
    assert int(passed[1]) > 20, "the kit and its own"


def test_an_engine_runs_with_it_and_a_broken_one_is_contained(installed: Installed) -> None:
    shown = installed.python("run.py").splitlines()
    told = [line for line in shown if not line.startswith("  ")]
    assert told == [
        "Lru: the quiet tenant still has 0 of its 3 documents",
        "TenantFairLru: the quiet tenant still has 3 of its 3 documents",
        "Lru: the quiet tenant still has 0 of its 3 documents",
        "Broken had 8 faults and is set aside; Lru decides",
    ]
    spans = [line for line in shown if line.startswith("  span evict:")]
    assert len(spans) == 8
    assert all("'octavo.policy_fault': 'victims: KeyError'" in line for line in spans)
