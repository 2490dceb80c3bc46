"""SGLang's ``RadixCache`` as a side of ``bookkeeping.py``, on its own pools and with the calls of its own scheduler.

Importing SGLang asks for kernels, models and a web server that the cache never calls. What is named in ``STAND_INS`` is
therefore imported as an empty module; everything that runs here is SGLang's own: ``Req`` and ``ScheduleBatch``,
``RadixCache``, ``ReqToTokenPool``, ``PagedTokenToKVPoolAllocator`` (on the CPU with its own torch code in place of its
kernels), and the functions that the scheduler calls between two forward passes. In its order:

* *admit*: ``Req(...)``, ``Req.init_next_round_input`` (``match_prefix``), ``RadixCache.lock`` (``inc_lock_ref``), and
  ``alloc_for_extend`` on the fields that ``ScheduleBatch.prepare_for_extend`` sets: it evicts, takes a row and slots,
  and writes the slots into the row.
* *commit*: what a prefill's result does: the first token is appended and ``checkpoint_kv_cache`` inserts the prompt.
* *decode*: ``alloc_for_decode`` for the whole running batch, then each request gets its token.
* *finish*: ``release_kv_cache`` inserts what was decoded, frees the rest, and unlocks (``dec_lock_ref``).

What a batch does for a forward pass (its input ids, sampling, merging and filtering) is left out. Each prompt is a
prefill batch of its own, as on the other sides; several in one batch would share the fixed costs of its tensor calls.
What is decoded is published by *finish*, and by *decode* on the other sides.
"""

from __future__ import annotations

import sys
from array import array
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

STAND_INS = (
    "PIL",
    "dill",
    "pybase64",
    "starlette",
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.constrained",
    "sglang.srt.layers",
)
"""Packages, with everything below them, that are imported and not called here: images, pickles, the web server, GPU
kernels, models, grammars, layers."""

DECODER_ONLY = SimpleNamespace(is_encoder_decoder=False)
"""What is asked of a model's configuration."""


class Nothing:
    """Any name of a package that is not there: can be called, indexed, inherited from, and used as a decorator."""

    def __init__(self, *_: object, **__: object) -> None:
        """Of nothing."""

    def __call__(self, *arguments: object, **_: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: object) -> Nothing:
        return self

    def __or__(self, _: object) -> Nothing:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[object]:
        return iter(())

    def __mro_entries__(self, _: tuple[object, ...]) -> tuple[type, ...]:
        return ()


class EmptyModule(ModuleType):
    """A package in which every name is there."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class StandInFinder:
    """Finds ``EmptyModule`` for the packages that it was given, and nothing else; for ``sys.meta_path``."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if not any(name == each or name.startswith(f"{each}.") for each in self._names):
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # what importlib asks of a loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class Sglang:
    """Its cache and its pools of ``num_blocks`` pages: on the CPU, LRU, no events, no metrics, one thread."""

    def __init__(self, num_blocks: int, block_size: int, requests: int) -> None:
        """``requests``: how many may run at once."""
        import_bare("sglang", STAND_INS)
        import torch  # noqa: PLC0415  # of the peer's environment, here and below
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch  # noqa: PLC0415
        from sglang.srt.mem_cache import allocation, common  # noqa: PLC0415
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: PLC0415
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: PLC0415
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool  # noqa: PLC0415
        from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: PLC0415
        from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: PLC0415

        torch.set_num_threads(1)
        torch.set_grad_enabled(False)  # as its scheduler's loop does
        _configure()
        size = num_blocks * block_size
        self._rows = ReqToTokenPool(requests, size, "cpu", enable_memory_saver=False)
        self._slots = PagedTokenToKVPoolAllocator(size, block_size, torch.float32, "cpu", None, need_sort=False)
        self._cache = RadixCache(CacheInitParams(False, self._rows, self._slots, block_size))
        self._request, self._new_batch, self._finished = Req, ScheduleBatch, FINISH_LENGTH
        self._tensor, self._int64 = torch.tensor, torch.int64
        self._allocation, self._common = allocation, common
        self._params = SamplingParams(max_new_tokens=size)
        self._next_id = 0
        self._running: dict[str, Req] = {}
        self._batch: ScheduleBatch | None = None
        self._arrived = 0

    def encode(self, tokens: list[int]) -> array[int]:
        return array("q", tokens)

    def admit(self, prompt: array[int]) -> Req:
        self._next_id += 1
        request = self._request(str(self._next_id), "", prompt, self._params)
        request.init_next_round_input(self._cache)
        request.lock = self._cache.lock(request.last_node)
        request.extend_end = len(request.full_untruncated_fill_ids)
        batch = self._batch_of([request], [request.extend_end])
        batch.prefix_lens, batch.extend_lens = [request.prefix_len], [request.extend_len]
        batch.extend_num_tokens = request.extend_len
        self._allocation.alloc_for_extend(batch)
        self._running[request.rid] = request
        self._batch = None
        return request

    def commit(self, handle: Req) -> None:
        handle.output_ids.append(1)
        self._common.checkpoint_kv_cache(handle, self._cache)

    def decode(self, handle: Req, token: int) -> None:
        """The last of the running requests makes the step of all."""
        self._arrived += 1
        if self._arrived == len(self._running):
            self._arrived = 0
            self._step()
        handle.output_ids.append(token)

    def finish(self, handle: Req) -> None:
        handle.finished_reason = self._finished(len(handle.output_ids))
        self._common.release_kv_cache(handle, self._cache, checkpoint=True)
        del self._running[handle.rid]
        self._batch = None

    def _step(self) -> None:
        batch = self._batch
        if batch is None:
            requests = list(self._running.values())
            batch = self._batch = self._batch_of(requests, [request.kv.kv_committed_len for request in requests])
            rows = [request.kv.req_pool_idx for request in requests]
            batch.req_pool_indices = batch.req_pool_indices_cpu = self._tensor(rows, dtype=self._int64)
        batch.out_cache_loc = self._allocation.alloc_for_decode(batch, token_per_req=1)
        batch.seq_lens = batch.seq_lens + 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1

    def _batch_of(self, requests: list[Req], lengths: list[int]) -> ScheduleBatch:
        batch = self._new_batch(
            reqs=requests,
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._slots,
            tree_cache=self._cache,
            model_config=DECODER_ONLY,
            device="cpu",
        )
        batch.seq_lens = self._tensor(lengths, dtype=self._int64)
        batch.seq_lens_cpu = self._tensor(lengths, dtype=self._int64)
        return batch


def import_bare(name: str, stand_ins: Sequence[str]) -> None:
    """Let the modules of a package be imported without its ``__init__`` (SGLang's starts with models and web clients),
    and with empty modules for ``stand_ins``. Once; a package that was imported already stays as it is.

    :raises ModuleNotFoundError: when there is no such package.
    """
    if name in sys.modules:
        return
    found = PathFinder.find_spec(name)
    if found is None or found.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{name} is not installed", name=name)
    package = ModuleType(name)
    package.__path__ = list(found.submodule_search_locations)
    sys.modules[name] = package
    sys.meta_path.insert(0, StandInFinder(stand_ins))


def _configure() -> None:
    """The server's configuration that the calls read: its defaults, with torch's own kernels. No model is looked up."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    get_context().set_server_args(ServerArgs(model_path="none", attention_backend="torch_native", device="cpu"))
