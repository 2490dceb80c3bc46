from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

import octavo.errors
import octavo.plugins
import octavo.policies.eviction.base

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOT_SHIPPED = {"tests", "examples", "build", "dist"}


def packages_in_the_tree() -> set[str]:
    found = set()
    for init in ROOT.rglob("__init__.py"):
        folders = init.parent.relative_to(ROOT).parts
        hidden = any(folder.startswith(".") for folder in folders)
        if not hidden and not NOT_SHIPPED.intersection(folders[:1]):
            found.add(".".join(("octavo", *folders)))
    return found


def own_file(module: ModuleType) -> Path | None:
    """Where a module of the package lies; ``None`` for all others, those of an environment inside the root too."""
    file: str | None = getattr(module, "__file__", None)
    path = Path(file or "/").resolve()
    apart = (ROOT / ".venv", ROOT / "examples", ROOT / "tests")
    return path if path.is_relative_to(ROOT) and not any(path.is_relative_to(folder) for folder in apart) else None


def test_every_package_is_listed() -> None:
    """A folder that is missing from the list works in the editable install and is missing from the wheel."""
    assert sorted(packages_in_the_tree()) == sorted(PROJECT["tool"]["setuptools"]["packages"])


def test_the_installed_version_is_the_one_of_the_project() -> None:
    assert version("octavo") == PROJECT["project"]["version"]


def test_the_types_are_marked_as_usable() -> None:
    assert (Path(octavo.errors.__file__).parent / "py.typed").is_file()


def test_each_module_is_loaded_once() -> None:
    """Two copies of a module mean two of every class: errors that nobody catches, policies of a foreign base."""
    files = Counter(
        str(path)
        for name, module in list(sys.modules.items())
        if name != "__main__" and (path := own_file(module)) is not None
    )
    assert files[str(ROOT / "errors.py")] == 1
    assert [file for file, copies in files.items() if copies > 1] == []


@pytest.mark.parametrize("group", sorted(PROJECT["project"]["entry-points"]))
def test_the_installed_entry_points_are_those_of_the_project_and_load(group: str) -> None:
    installed = {entry.name: entry for entry in entry_points(group=group) if entry.dist and entry.dist.name == "octavo"}
    assert {name: entry.value for name, entry in installed.items()} == PROJECT["project"]["entry-points"][group]
    for entry in installed.values():
        assert isinstance(entry.load(), type)


def test_the_command_exists() -> None:
    [command] = [entry for entry in entry_points(group="console_scripts") if entry.name == "octavo"]
    assert callable(command.load())


def test_all_is_the_extras_that_users_need_and_every_extra_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    users = ",".join(sorted(set(extras) - {"all", "bench", "dev"}))
    assert extras["all"] == [f"octavo[{users}]"]
    assert f"octavo[{users}]" in extras["dev"]


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "source"  # a build leaves folders behind, whose contents get into the next wheel
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".?*", "build", "dist", "*.egg-info"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(copy),
    ]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)  # noqa: S603  # our own words
    [wheel] = tmp_path.glob("octavo-*.whl")
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        [entries] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        written = archive.read(entries).decode()
    info = entries.rpartition("/")[0]
    folders = {name.rpartition("/")[0] for name in names if not name.startswith(info)}
    settings = PROJECT["tool"]["setuptools"]
    packages = {package.replace(".", "/") for package in settings["packages"]}
    assert folders == packages | {"octavo/engine/server/ui", "octavo/engine/model/native/src"}
    for package, patterns in settings["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        data = {path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)}
        assert data
        assert {f"{package.replace('.', '/')}/{path}" for path in data} <= set(names)
    assert "octavo/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    for group, offers in PROJECT["project"]["entry-points"].items():
        assert f"[{group}]" in written
        for name, target in offers.items():
            assert f"{name} = {target}" in written
