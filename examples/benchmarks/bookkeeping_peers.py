"""Other engines' managers as sides of ``bookkeeping.py``: each in a process and an environment of its own.

    PEER_ENVIRONMENT/bin/python bookkeeping_peers.py vllm

answers a line ``[tokens, seed]`` on stdin with a line of medians on stdout (``bookkeeping_acts.one_round``). Between
two questions it sleeps, so that the sides can take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from octavo.examples.benchmarks.bookkeeping_acts import BLOCK_SIZE, PROMPTS, one_round
    from octavo.examples.benchmarks.bookkeeping_sglang import Sglang
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from bookkeeping_acts import BLOCK_SIZE, PROMPTS, one_round
    from bookkeeping_sglang import Sglang

LONGEST = 1 << 20
"""Tokens that a sequence may have."""


class Vllm:
    """``vllm.v1.core.kv_cache_manager.KVCacheManager`` as its scheduler drives it: full attention, prefix caching on,
    the default hash, no statistics, no events.

    A request hashes its blocks when it is made and when it grows; blocks are published when they are allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        import torch  # noqa: PLC0415  # of the peer's environment, here and below
        from vllm.sampling_params import SamplingParams  # noqa: PLC0415
        from vllm.utils.hashing import sha256  # noqa: PLC0415
        from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: PLC0415
        from vllm.v1.request import Request as Made  # noqa: PLC0415

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])  # one is the null block
        self._manager = KVCacheManager(config, LONGEST, BLOCK_SIZE, BLOCK_SIZE)
        self._request = Made
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._params = SamplingParams(max_tokens=LONGEST)
        self._next_id = 0

    def encode(self, tokens: list[int]) -> list[int]:
        return tokens

    def admit(self, prompt: list[int]) -> Request:
        self._next_id += 1
        request = self._request(str(self._next_id), prompt, self._params, None, block_hasher=self._hasher)
        manager = self._manager
        blocks, computed, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - computed, computed, blocks) is None:
            raise MemoryError("not enough blocks")
        return request

    def commit(self, handle: Request) -> None:
        handle.num_computed_tokens = handle.num_tokens
        handle.append_output_token_ids(1)

    def decode(self, handle: Request, token: int) -> None:
        if self._manager.allocate_slots(handle, 1) is None:
            raise MemoryError("not enough blocks")
        handle.num_computed_tokens += 1
        handle.append_output_token_ids(token)

    def finish(self, handle: Request) -> None:
        self._manager.free(handle)


Round: TypeAlias = "Callable[[int, int], dict[str, float]]"
"""Tokens and seed -> medians."""


def _vllm_round(tokens: int, seed: int) -> dict[str, float]:
    return one_round(Vllm, tokens, seed)


def _sglang_round(tokens: int, seed: int) -> dict[str, float]:
    return one_round(lambda num_blocks: Sglang(num_blocks, BLOCK_SIZE, PROMPTS), tokens, seed)


PEERS: dict[str, Round] = {"vllm": _vllm_round, "sglang": _sglang_round}


class PeerFailed(Exception):
    """A peer's process ended; the end of what it had to say is in the message."""


class Peer:
    """A peer at work in its own process; to be used in a ``with``."""

    def __init__(self, name: str, environment: Path, log: IO[str]) -> None:
        """``environment``: a virtual environment that has the peer. ``log``: a file that takes what it says."""
        self.name = name
        self._log = log
        self._process = subprocess.Popen(  # noqa: S603  # our own file, in an environment that the caller chose
            [environment / "bin" / "python", __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def one_round(self, tokens: int, seed: int) -> dict[str, float]:
        """Its medians.

        :raises PeerFailed: when its process has ended.
        """
        to_peer, from_peer = self._process.stdin, self._process.stdout
        answer = ""
        if to_peer is not None and from_peer is not None:
            try:
                to_peer.write(json.dumps([tokens, seed]) + "\n")
                to_peer.flush()
                answer = from_peer.readline()
            except BrokenPipeError:
                answer = ""
        if not answer:
            self._log.seek(0)
            raise PeerFailed(f"{self.name}: {self._log.read()[-500:]}")
        medians: dict[str, float] = json.loads(answer)
        return medians


def serve(one: Round) -> None:
    """Answer until stdin ends. What the peer prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        tokens, seed = json.loads(line)
        print(json.dumps(one(tokens, seed)), file=answers, flush=True)


if __name__ == "__main__":
    serve(PEERS[sys.argv[1]])
