from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.native import build
from octavo.engine.model.native.build import built
from octavo.tests.engine.model.native.native_rig import WatchedKernels


@pytest.fixture(scope="session")
def library_file() -> Path:
    """The compiled kernels, where every engine on this machine keeps them."""
    if not any(shutil.which(name) for name in build._COMPILERS):
        pytest.skip("no kernels: no C++ compiler")
    return built(default_cache_dir() / "native")


@pytest.fixture(scope="session", params=["this processor", "any processor"])
def kernels(request: pytest.FixtureRequest, library_file: Path, pytestconfig: pytest.Config) -> WatchedKernels:
    """As they are used here, and as they come out where the compiler may use no wide registers: other lines of the
    sources. Those are kept in the cache of the tests, since they take some seconds, too."""
    if request.param == "this processor":
        return WatchedKernels(library_file)
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir("kernels")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", tuple(flag for flag in build._FLAGS if flag != "-march=native"))
        return WatchedKernels(built(folder))
