from __future__ import annotations

from collections import Counter
from pathlib import Path

from octavo.tests.mutation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_mutant_applies_to_the_product_as_it_is() -> None:
    """A refactoring moves the text away from under them; running them all takes too long to notice it every time."""
    texts = {file: (ROOT / file).read_text() for file in {mutant.file for mutant in MUTANTS}}
    stray = {mutant.name: count for mutant in MUTANTS if (count := texts[mutant.file].count(mutant.old)) != 1}
    assert stray == {}


def test_every_mutant_changes_something_and_has_a_name_and_tests_of_its_own() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new or not mutant.tests] == []
    missing = {test for mutant in MUTANTS for test in mutant.tests if not _exists(*test.split("::"))}
    assert missing == set()


def _exists(file: str, test: str = "") -> bool:
    """A file of tests, or one test in it."""
    path = ROOT / file
    return path.is_file() and (not test or f"def {test}(" in path.read_text())
