"""Are the tests worth anything? Brings each fault of ``mutants.py`` back, in a copy, and sees whether the tests notice.

    python tests/mutation/run.py              # all of them, a few minutes
    python tests/mutation/run.py 17 headroom  # those whose name contains one of the words

Exit status 1 when a mutant survives or does not apply any more, or when the tests fail without one.
"""

# ruff: noqa: S603, T201  # it runs pytest, and reports to whoever called it

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import cache_from_source
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.tests.mutation.mutants import MUTANTS, Mutant
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
"""After which a run counts as noticed: the mutant made an endless loop."""
ALL_SECONDS = 1800
"""The same for all tests together, without any mutant."""


def main(words: list[str]) -> int:
    """Run those mutants whose name contains one of ``words``, or all."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name.split() for word in words)]
    chosen = chosen or [mutant for mutant in MUTANTS if any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="octavo-mutation-") as folder:
        tree = _copy(Path(folder))
        if not _is_imported_from(tree):
            print("the copy is not what `import octavo` finds; nothing was tested")
            return 1
        if _tests_fail(tree, tuple(sorted({test for mutant in chosen for test in mutant.tests})), ALL_SECONDS):
            print("the tests fail without any mutant; nothing was tested")
            return 1
        problems = [problem for mutant in chosen if (problem := _problem_with(mutant, tree))]
    print(f"{len(chosen) - len(problems)} of {len(chosen)} mutants were noticed")
    return 1 if problems or not chosen else 0


def _problem_with(mutant: Mutant, tree: Path) -> str | None:
    """``None`` when a test notices the mutant."""
    started = monotonic()
    path = tree / mutant.file
    text = path.read_text()
    problem = None
    if text.count(mutant.old) != 1:
        problem = f"does not apply: its text occurs {text.count(mutant.old)} times"
    else:
        _write(path, text.replace(mutant.old, mutant.new))
        if not _tests_fail(tree, mutant.tests):
            problem = "SURVIVED"
        _write(path, text)
    print(f"{problem or 'noticed'} ({monotonic() - started:.1f} s): {mutant.name}", flush=True)
    return problem


def _copy(folder: Path) -> Path:
    """The whole tree under the name that it is imported by."""
    tree = folder / "octavo"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=skipped)
    return tree


def _is_imported_from(tree: Path) -> bool:
    code = "import octavo, octavo.engine.kv.block_pool as b; print(octavo.__file__); print(b.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(tree),
        cwd=tree.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    found = run.stdout.split()
    return len(found) == 2 and all(Path(file).resolve().is_relative_to(tree.resolve()) for file in found)


def _tests_fail(tree: Path, tests: tuple[str, ...], seconds: float = SECONDS) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(
            command, env=_environment(tree), cwd=tree, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    if run.returncode > 1:  # neither passed nor failed: nothing was tested
        raise SystemExit(f"pytest did not run:\n{run.stdout}\n{run.stderr}")
    return run.returncode == 1


def _environment(tree: Path) -> dict[str, str]:
    """``PYTHONPATH`` goes before the hook of an editable installation."""
    return os.environ | {"PYTHONPATH": str(tree.parent)}


def _write(path: Path, text: str) -> None:
    """With the bytecode dropped: two versions of one length within one second look the same to an import."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
