"""OpenVINO, step by step: its paged attention over block tables, without the engine of OpenVINO GenAI around it.

The model is read from the IR. ``paged_attention_transformation`` puts a ``PagedAttentionExtension`` in the place of
each attention, which reads and writes a cache of shape [blocks, kv_heads, block_size, head_dim]. As in OpenVINO GenAI
the last token of each row is gathered before the head.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

if TYPE_CHECKING:
    from octavo.examples.benchmarks.peers.steps import Batch, Best, StepOpening, serve_steps
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from steps import Batch, Best, StepOpening, serve_steps

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
LAST = "sampled_tokens_indices"
"""As OpenVINO GenAI calls it."""
WORD = 2
"""Bytes."""


class Packed(NamedTuple):
    """A batch as arrays."""

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    tables: list[npt.NDArray[np.int32]]


class Chosen(NamedTuple):
    """Of each row."""

    tokens: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]


class OpenVinoSteps:
    """A compiled model and its cache."""

    def __init__(self, opening: StepOpening) -> None:
        precision = PRECISIONS[opening.dtype]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": opening.threads,
            "NUM_STREAMS": 1,
        }
        model = openvino.Core().read_model(Path(opening.model) / "openvino_model.xml")
        _page(model)
        compiled = openvino.Core().compile_model(model, "CPU", properties)
        self._request = compiled.create_infer_request()
        for port in compiled.inputs:
            if "_cache." in port.get_any_name():
                self._request.set_tensor(port, _cache(port, opening))

    def prepare(self, batch: Batch) -> Packed:
        return Packed(
            np.array(batch.tokens, np.int64),
            np.array(batch.positions, np.int64),
            np.array(batch.lengths, np.int32),
            np.array(batch.contexts, np.int32),
            [np.array(table, np.int32) for table in batch.tables],
        )

    def execute(self, prepared: Packed) -> Chosen:
        ends = np.cumsum(prepared.lengths, dtype=np.int32)
        sizes = [len(table) for table in prepared.tables]
        given = {
            "input_ids": prepared.tokens,
            "position_ids": prepared.positions,
            "past_lens": prepared.contexts - prepared.lengths,
            "subsequence_begins": np.concatenate(([0], ends), dtype=np.int32),
            "block_indices": np.concatenate(prepared.tables),
            "block_indices_begins": np.cumsum([0, *sizes], dtype=np.int32),
            "max_context_len": np.array(prepared.contexts.max()),
            LAST: ends.astype(np.int64) - 1,
        }
        for name, values in given.items():
            self._request.set_tensor(name, openvino.Tensor(values))
        self._request.infer()
        logits = self._request.get_tensor("logits").data[:, 0]
        return Chosen(logits.argmax(axis=1), logits)

    def best(self, output: Chosen, top: int) -> Best:
        highest = output.logits.max(axis=1, keepdims=True)
        scores = output.logits - highest - np.log(np.exp(output.logits - highest).sum(axis=1, keepdims=True))
        order = np.argsort(-scores, axis=1, kind="stable")[:, :top]
        return [[(int(at), float(row[at])) for at in best] for best, row in zip(order, scores, strict=True)]


def _page(model: openvino.Model) -> None:
    """Attention over block tables, and logits for the tokens that are asked for."""
    paged_attention_transformation(model)
    head = model.get_results()[0].input_value(0).get_node()
    last = opset13.parameter([-1], np.int64, name=LAST)
    last.output(0).get_tensor().set_names({LAST})
    gathered = opset13.gather(head.input_value(0), last, opset13.constant(np.array(0)))
    head.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([last])
    model.validate_nodes_and_infer_types()


def _cache(port: openvino.ConstOutput, opening: StepOpening) -> openvino.Tensor:
    """All blocks with the same numbers, each in memory of its own.

    :raises ValueError: when the plug-in wants another block size.
    """
    _, heads, block_size, width = port.partial_shape
    if block_size.get_length() != opening.block_size:
        raise ValueError(f"blocks have {block_size.get_length()} tokens here")
    block = (heads.get_length(), opening.block_size, width.get_length())
    cache = openvino.Tensor(port.element_type, openvino.Shape([opening.blocks, *block]))
    numbers = np.random.default_rng(0).standard_normal(block, dtype=np.float32)
    words = numbers.view(np.uint16).reshape(*block, -1)[..., -(cache.element_type.size // WORD) :]
    cache.data.view(np.uint16)[:] = words.reshape(*block[:-1], -1)  # a bfloat16 is the upper word of a float32
    return cache


if __name__ == "__main__":
    serve_steps(OpenVinoSteps)
