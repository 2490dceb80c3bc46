"""Engines in processes of their own, with a real model, that share a Redis server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(300),
]

StartRedis: TypeAlias = Callable[..., subprocess.Popen[bytes]]
CHILD = Path(__file__).with_name("shared_tier_child.py")
BLOCK = 8
IDS = [(7 * at + at * at) % 96 for at in range(45)]
WHOLE = (len(IDS) - 1) // BLOCK


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and a later version of it in which one weight is another."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        max_position_embeddings=256,
    )
    folders = [tmp_path_factory.mktemp("model") for _ in range(2)]
    model = LlamaForCausalLM(config)
    for folder in folders:
        model.save_pretrained(folder)
    weights = load_file(folders[1] / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][0, 0] += 1.0
    save_file(weights, folders[1] / "model.safetensors", metadata={"format": "pt"})
    return str(folders[0]), str(folders[1])


class Replica:
    """An engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line() == "ready"

    def ask(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """What it said, and how many blocks it has loaded so far."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(ids)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self._line())
        assert answer["corrupt"] == 0
        return answer["tokens"], answer["loaded"]

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def replicas(url: str, *folders: str) -> Iterator[list[Replica]]:
    """They load at the same time, and are ended together."""
    with ExitStack() as stack:
        processes = []
        for folder in folders:
            command = [sys.executable, str(CHILD), folder, url]
            process = subprocess.Popen(  # noqa: S603  # ours
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield [Replica(process) for process in processes]


@pytest.mark.slow
def test_processes_share_what_they_compute_and_survive_each_other_and_the_server(
    models: tuple[str, str], start_redis: StartRedis, socket_path: Path
) -> None:
    model, later = models
    server = start_redis(socket_path)
    with replicas(f"unix://{socket_path}", model, model, later) as (first, second, newer):
        expected, loaded = first.ask(IDS)
        assert loaded == 0
        assert second.ask(IDS) == (expected, WHOLE), "it was open before that was written"
        assert second.ask(IDS) == (expected, WHOLE), "on its device now"
        answer, loaded = newer.ask(IDS)
        assert loaded == 0, "one weight is another"
        assert answer != expected
        first.process.kill()
        first.process.wait()
        longer = [*IDS, *expected, *range(20)]
        answer, loaded = second.ask(longer)
        assert loaded == WHOLE, "the rest nobody has computed"
        server.kill()
        server.wait()
        assert second.ask(longer)[0] == answer
        alone = [(at * 5) % 96 for at in range(40)]
        told = second.ask(alone)[0]
        start_redis(socket_path)
        with replicas(f"unix://{socket_path}", model) as [third]:
            assert third.ask(longer) == (answer, 0), "the server has forgotten everything"
            assert third.ask(alone)[0] == told
