from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.errors import ContractBroken, PluginError, PluginImportFailed, UnknownPlugin
from octavo.plugins import PluginGroup
from octavo.policies.eviction import EvictionPolicy, Lru

GROUP = "octavo.eviction_policies"
POLICIES = PluginGroup(GROUP, EvictionPolicy)

GOOD = """
from octavo.policies.eviction import Lru

class Arc(Lru):
    pass

class Outer:
    class Inner(Lru):
        pass
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, version, entries, module=source)``: a distribution on the path, by default in one folder."""
    before = set(sys.modules)

    def install(name: str, version: str, entries: str, *, folder: str = "site", **modules: str) -> None:
        site = tmp_path / folder
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)

    yield install
    for module in set(sys.modules) - before:
        del sys.modules[module]


def test_the_built_in_names_resolve() -> None:
    assert POLICIES.resolve("lru") is Lru
    assert POLICIES.find("lru").distribution == "octavo 0.1.0"


def test_a_plugin_of_another_distribution_resolves_and_its_origin_is_known(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    found = POLICIES.find("mru")
    assert (found.name, found.distribution, found.cls.__qualname__) == ("mru", "octavo-arc 1.2", "Arc")
    assert issubclass(found.cls, Lru)


def test_only_what_is_asked_for_is_imported(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc\nboom = fake_boom:Boom", fake_arc=GOOD, fake_boom="1 / 0")
    POLICIES.resolve("mru")
    assert "fake_arc" in sys.modules
    assert "fake_boom" not in sys.modules


@pytest.mark.parametrize("spec", ["fake_arc:Arc", "fake_arc:Outer.Inner"])
def test_a_class_can_be_given_by_its_path(install: Install, spec: str) -> None:
    install("octavo-arc", "1.2", "", fake_arc=GOOD)
    found = POLICIES.find(spec)
    assert found.cls.__module__ == "fake_arc"
    assert found.distribution is None


def test_an_unknown_name_lists_what_is_installed_and_the_nearest(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    with pytest.raises(UnknownPlugin) as caught:
        POLICIES.resolve("lur")
    message = str(caught.value)
    for part in ("'lur'", GROUP, "Did you mean 'lru'?", "mru (octavo-arc 1.2)", "cost_aware (octavo 0.1.0)"):
        assert part in message


def test_an_unknown_name_in_an_empty_group_says_so() -> None:
    with pytest.raises(UnknownPlugin, match="Installed: nothing"):
        PluginGroup("octavo.no_such_group", EvictionPolicy).resolve("lru")


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("fake_boom:Boom", ZeroDivisionError),
        ("fake_boom_absent:Boom", ModuleNotFoundError),
        ("fake_arc:Missing", AttributeError),
        ("not a target", Exception),
    ],
)
def test_what_cannot_be_imported_names_its_distribution_and_cause(
    install: Install, target: str, cause: type[Exception]
) -> None:
    install("octavo-boom", "3.0", f"boom = {target}", fake_boom="1 / 0", fake_arc=GOOD)
    with pytest.raises(PluginImportFailed) as caught:
        POLICIES.resolve("boom")
    assert "octavo-boom 3.0" in str(caught.value)
    assert target in str(caught.value)
    assert isinstance(caught.value.__cause__, cause)


def test_a_path_that_cannot_be_imported_says_why() -> None:
    with pytest.raises(PluginImportFailed, match="ModuleNotFoundError"):
        POLICIES.resolve("no_such_package.module:Class")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("class P: pass", "must be a subclass of octavo.policies.eviction.base.EvictionPolicy"),
        ("def P(capacity): return None", "must be a subclass of"),
        ("P = 3", "must be a subclass of"),
        ("from octavo.policies.eviction import EvictionPolicy as P", "does not implement victims"),
        ("from octavo.policies.eviction import Lru\nclass P(Lru): api_version = (2, 0)", "api_version"),
        ("from octavo.policies.eviction import Lru\nclass P(Lru): api_version = '1.0'", "api_version"),
    ],
)
def test_what_breaks_the_contract_is_refused_with_its_distribution(
    install: Install, source: str, complaint: str
) -> None:
    install("octavo-bad", "0.1", "bad = fake_bad:P", fake_bad=source)
    with pytest.raises(ContractBroken) as caught:
        POLICIES.resolve("bad")
    assert complaint in str(caught.value)
    assert "octavo-bad 0.1" in str(caught.value)


def test_another_minor_version_is_accepted(install: Install) -> None:
    source = "from octavo.policies.eviction import Lru\nclass P(Lru): api_version = (1, 7)"
    install("octavo-minor", "0.1", "minor = fake_minor:P", fake_minor=source)
    assert POLICIES.resolve("minor").api_version == (1, 7)


def test_one_name_from_two_distributions_is_an_error_that_names_both_and_spares_the_rest(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    install("other-arc", "9", "mru = fake_arc:Arc")
    with pytest.raises(PluginError, match=r"octavo-arc 1\.2 .* and other-arc 9 "):
        POLICIES.resolve("mru")
    assert POLICIES.resolve("lru") is Lru
    assert POLICIES.resolve("fake_arc:Arc").__qualname__ == "Arc"


def test_one_distribution_that_is_met_twice_on_the_path_is_no_duplicate(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", folder="other", fake_arc=GOOD)
    assert POLICIES.resolve("mru").__qualname__ == "Arc"


def test_the_report_lists_good_and_broken_ones_and_raises_nothing(install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    install("octavo-boom", "3.0", "boom = fake_boom:Boom\nlru = fake_boom:Boom", fake_boom="1 / 0")
    rows = {(row.name, row.distribution): row for row in POLICIES.report()}
    assert list(rows) == sorted(rows)
    arc, boom = rows["mru", "octavo-arc"], rows["boom", "octavo-boom"]
    assert arc == (GROUP, "mru", "octavo-arc", "1.2", "fake_arc:Arc", None)
    assert boom.error is not None
    assert "ZeroDivisionError" in boom.error
    for owner in ("octavo", "octavo-boom"):
        error = rows["lru", owner].error
        assert error is not None
        assert "offered more than once" in error
    assert rows["cost_aware", "octavo"].error is None


def test_a_distribution_without_metadata_is_listed_all_the_same(tmp_path: Path, install: Install) -> None:
    install("octavo-arc", "1.2", "mru = fake_arc:Arc", fake_arc=GOOD)
    (tmp_path / "site" / "octavo_arc-1.2.dist-info" / "METADATA").unlink()
    [row] = [row for row in POLICIES.report() if row.name == "mru"]
    assert (row.distribution, row.version, row.error) == ("unknown", "unknown", None)
