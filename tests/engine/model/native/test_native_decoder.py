"""A decoder in one call of the kernels against the program it stands for and against the model itself."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.model import transformers_runner
from octavo.engine.model.attention.native_backend import NativeBackend
from octavo.engine.model.attention.torch_backend import TorchBackend
from octavo.engine.model.decoder import ModuleDecoder
from octavo.engine.model.lowering import Program, lower
from octavo.engine.model.lowering.linear import can_pack
from octavo.engine.model.lowering.native_decoder import NativeDecoder
from octavo.engine.model.native.product import NativeProduct
from octavo.engine.model.probe import probe
from octavo.errors import ModelError
from octavo.tests.engine.model.native.native_decoder_rig import (
    CASES,
    CPU,
    MIXED,
    SHORT_WINDOW,
    WIDE,
    Case,
    Part,
    Rig,
    assert_agrees,
    assert_same_cache,
    case_logits,
    model_of,
    pools,
    rig,
    rig_of,
    runner_of,
    several_parts,
)
from octavo.tests.engine.model.native.native_rig import WatchedKernels, threads
from octavo.tests.engine.model.test_transformers_runner import (
    MIXED_STEPS,
    Driver,
    ShowingSampler,
    assert_equal,
    build,
    eager_greedy,
    eager_logits,
    prompt,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def able(kernels: WatchedKernels) -> Iterator[WatchedKernels]:
    """They multiply even where oneDNN would be faster, so that those lines of the sources run, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "has_products", True)
        yield kernels


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_step_equals_the_program_and_the_model(able: WatchedKernels, case: str) -> None:
    for seed in (1, 2):
        step = Case.of(MIXED, seed=seed)
        assert_agrees(rig(able, case), step, step.everything())


@pytest.mark.parametrize("case", ["llama of odd sizes", "qwen3", "smollm3"])
@given(several_parts, st.sampled_from([1, 3, 4, 16]), st.data())
def test_any_step_equals_the_program_and_the_model(
    able: WatchedKernels, case: str, parts: list[Part], block_size: int, data: st.DataObject
) -> None:
    step = Case.of(parts, block_size=block_size, seed=len(parts))
    keep = data.draw(st.lists(st.sampled_from(step.everything()), max_size=2 * len(step.everything())))
    assert_agrees(rig(able, case), step, keep)


@pytest.mark.parametrize(
    "keep",
    [(), (0,), (24,), (5, 5, 5), (24, 3, 11, 0), (*range(25), *range(24, -1, -1), 7, 7)],
    ids=["nothing", "the first", "the last", "one thrice", "out of order", "more than there are"],
)
def test_logits_come_for_what_is_kept_in_its_order(able: WatchedKernels, keep: tuple[int, ...]) -> None:
    step = Case.of(MIXED)
    assert len(step.everything()) == 25
    llama = rig(able, "llama of odd sizes")
    assert_agrees(llama, step, keep)
    whole = case_logits(llama, step)
    assert torch.equal(step.run(llama.native.decoder, llama.attention, step.cache(llama), keep), whole[list(keep)])


@pytest.mark.parametrize("case", ["llama", "phi3 that turns half of a head"])
@pytest.mark.parametrize("step", [(Part(0, 0, 0, 1),), (Part(0, 0, 600, 1),), (Part(0, 0, 0, 600), Part(0, 0, 150, 1))])
def test_steps_of_one_token_and_of_very_many(able: WatchedKernels, case: str, step: tuple[Part, ...]) -> None:
    made = Case.of(step, block_size=16)
    assert_agrees(rig(able, case), made, [0, len(made.everything()) - 1])


def test_weights_that_are_bfloat16_and_others_in_one_float32_model(able: WatchedKernels) -> None:
    model = model_of(*CASES["llama of odd sizes"])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ("layers.0" in name or "down_proj" in name):
            parameter.data = parameter.data.bfloat16().float()
    llama, step = rig_of(able, model), Case.of(MIXED)
    first, last = (llama.native.program.layers[i] for i in (0, -1))
    products = (first.qkv, first.out, first.gate_up, first.down, last.down, last.qkv, llama.native.program.head)
    assert [each.taken for each in products if isinstance(each, NativeProduct)] == [2, 2, 2, 2, 2, 1, 1]
    assert_agrees(llama, step, step.everything())


@pytest.mark.parametrize("case", [*CASES, "mistral with a short window"])
def test_a_runner_decodes_as_the_model_itself(able: WatchedKernels, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_runner, "Sampler", ShowingSampler)
    model = model_of(*CASES.get(case, SHORT_WINDOW))
    prompts = [prompt(39), prompt(22, seed=2)]
    expected = [eager_logits(model, tokens) for tokens in prompts]
    continued = [eager_greedy(model, tokens, 3) for tokens in prompts]
    runner, watched = runner_of(model, able)
    driver = Driver(runner)
    for tokens in prompts:
        driver.add(tokens)
    for parts in MIXED_STEPS:
        for (sequence, first, count), logits in zip(parts, driver.step(parts), strict=True):
            assert_equal(logits, expected[sequence][first : first + count])
    for _ in range(3):
        driver.step([(s, len(driver.tokens[s]) - 1, 1) for s in (1, 0)])
        for sequence, output in zip((1, 0), driver.last.rows, strict=True):
            driver.tokens[sequence].append(output.sampled[0].token_id)
    assert [driver.tokens[s][len(prompts[s]) :] for s in (0, 1)] == continued
    assert watched.steps == (len(MIXED_STEPS) + 3 if case in CASES else 0)


def test_a_window_shorter_than_a_row_is_left_to_the_program(able: WatchedKernels) -> None:
    """And only then: the next step, of short rows, is native again."""
    mistral = rig_of(able, model_of(*SHORT_WINDOW))
    short, long = Case.of([Part(0, 0, 2, 4), Part(0, 0, 5, 1)]), Case.of([Part(0, 0, 2, 4), Part(0, 0, 3, 4)])
    for step, native in ((short, 1), (long, 0), (short, 1)):
        before = mistral.native.steps
        kv, own = step.cache(mistral), step.cache(mistral)
        got = step.run(mistral.native.decoder, mistral.attention, kv, step.everything())
        assert mistral.native.steps == before + native
        assert_equal(got, step.run(mistral.own, TorchBackend(CPU), own, step.everything()))
        assert_same_cache(kv, own)


def test_attention_of_another_backend_is_left_to_the_program(able: WatchedKernels) -> None:
    llama, step = rig(able, "llama"), Case.of(MIXED)
    before = llama.native.steps
    got = step.run(llama.native.decoder, TorchBackend(CPU), step.cache(llama), step.everything())
    assert llama.native.steps == before
    assert_equal(got, case_logits(llama, step))


def test_bfloat16_is_as_near_to_the_truth_as_the_model_itself(able: WatchedKernels) -> None:
    for case in ("llama", "qwen3", "phi3"):
        model = model_of(*CASES[case], torch.bfloat16)
        narrow = rig_of(able, model)
        exact = build(*CASES[case])
        exact.load_state_dict({name: each.float() for name, each in model.state_dict().items()})
        wide = rig_of(able, exact)._replace(dtype=torch.float32)
        step = Case.of([Part(0, 0, 0, 60), Part(0, 0, 0, 1), Part(0, 0, 0, 9)])
        truth = step.run(wide.own, TorchBackend(CPU), step.cache(wide), step.everything())
        own = step.run(narrow.own, TorchBackend(CPU), step.cache(narrow), step.everything()).float()
        assert (case_logits(narrow, step) - truth).norm() <= 1.1 * (own - truth).norm()


def test_two_pools_in_turn(able: WatchedKernels) -> None:
    """Pointers into the other one must not be used again, and what was bound stays alive."""
    llama = rig(able, "llama")
    steps = [Case.of(MIXED, seed=1), Case.of([Part(0, 0, 150, 30)], block_size=16, seed=2)]
    caches = [step.cache(llama) for step in steps]
    for i in (0, 1, 0, 0, 1):
        others = [pool.clone() for pool in pools(caches[1 - i])]
        reference = steps[i].cache(llama)
        before = llama.native.steps
        got = steps[i].run(llama.native.decoder, llama.attention, caches[i], steps[i].everything())
        assert llama.native.steps == before + 1
        assert_equal(got, steps[i].run(llama.own, TorchBackend(CPU), reference, steps[i].everything()))
        assert_same_cache(caches[i], reference)
        for pool, kept in zip(pools(caches[1 - i]), others, strict=True):
            torch.testing.assert_close(pool, kept, rtol=0, atol=0, equal_nan=True)
        assert llama.native.decoder._bound is not None
        assert llama.native.decoder._bound[0] is caches[i]


def test_new_pools_in_the_place_of_old_ones(able: WatchedKernels) -> None:
    llama, step = rig(able, "llama"), Case.of(MIXED)
    expected = case_logits(llama, step)
    for _ in range(5):
        assert torch.equal(case_logits(llama, step), expected)


def test_two_runners_and_a_closed_one(able: WatchedKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_runner, "Sampler", ShowingSampler)
    tokens = prompt(30)
    expected = eager_logits(model_of(*CASES["llama"]), tokens)
    made = [runner_of(model_of(*CASES["llama"]), able) for _ in range(2)]
    drivers = [Driver(runner, num_blocks=size) for (runner, _), size in zip(made, (20, 64), strict=True)]
    for driver in drivers:
        driver.add(tokens)
    for first, count in ((0, 9), (9, 1), (10, 15)):
        for driver in drivers:
            assert_equal(driver.step([(0, first, count)])[0], expected[first : first + count])
    assert [watched.steps for _, watched in made] == [3, 3]
    closed, pool = made[0][0], made[0][0]._kv
    assert pool is not None
    gone = [weakref.ref(each) for each in pools(pool)]
    del pool, made
    closed.close()
    gc.collect()
    assert not any(each() is not None for each in gone)
    with pytest.raises(ModelError, match="closed"):
        drivers[0].step([(0, 25, 1)])
    assert_equal(drivers[1].step([(0, 25, 5)])[0], expected[25:30])


def test_kernels_without_products_leave_all_to_the_program(kernels: WatchedKernels) -> None:
    """And so they do for a weight that does not come in pairs, and with one of the switches off."""
    model = model_of(*CASES["llama"])
    layers = probe(model)
    native = lower(model, layers, fused=True, packed=True, kernels=kernels)
    assert isinstance(native, NativeDecoder if kernels.has_products else Program)
    assert isinstance(lower(model, layers, fused=True, packed=False, kernels=kernels), Program)


@pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
def test_one_product_of_another_kind_leaves_all_to_the_program(able: WatchedKernels) -> None:
    model = model_of("llama", {**WIDE, "intermediate_size": 55})
    layers = probe(model)
    program = lower(model, layers, fused=True, packed=True, kernels=able)
    assert isinstance(program, Program)
    step = Case.of(MIXED)
    odd = Rig(ModuleDecoder(model), rig(able, "llama").native, layers, torch.float32, NativeBackend(able, shares=True))
    kv, own = step.cache(odd), step.cache(odd)
    got = step.run(program, odd.attention, kv, step.everything())
    assert_equal(got, step.run(odd.own, TorchBackend(CPU), own, step.everything()))
    assert_same_cache(kv, own)


@settings(max_examples=15)  # more threads than processors take their time
@given(several_parts, st.sampled_from([2, 3, 4]))
def test_any_number_of_threads(able: WatchedKernels, parts: list[Part], count: int) -> None:
    llama, step = rig(able, "llama of odd sizes"), Case.of(parts)
    with threads(count):
        got = case_logits(llama, step)
    assert_equal(got, case_logits(llama, step))


def test_from_several_python_threads_one_after_another(able: WatchedKernels) -> None:
    llama, step = rig(able, "llama"), Case.of(MIXED)
    with threads(2):
        expected = case_logits(llama, step)
        for _ in range(4):
            with ThreadPoolExecutor(1) as pool:
                assert torch.equal(pool.submit(case_logits, llama, step).result(), expected)


def test_more_teams_than_processors_at_once(able: WatchedKernels) -> None:
    """Each with a cache of its own; threads that wait give way to those that they wait for."""
    llama, step = rig(able, "llama"), Case.of(MIXED)
    decoders = [NativeDecoder(llama.native.program, able) for _ in range(3)]
    with threads((os.cpu_count() or 1) + 1):
        expected = case_logits(llama, step)
        with ThreadPoolExecutor(3) as pool:
            found = pool.map(
                lambda each: step.run(each, llama.attention, step.cache(llama), step.everything()), decoders
            )
            assert all(torch.equal(each, expected) for each in found)
