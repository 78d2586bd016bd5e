"""A native decode step gives what plain passes give, for every kind of layer and any cache that it takes up."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import lamina
from lamina.errors import CaptureError
from lamina.generation.strategies.captured import decode_captured
from lamina.generation.strategies.plain import decode_plain
from lamina.model import Model
from lamina.native.library import set_threads, threads
from lamina.native.recorder import Recorder
from lamina.rehearsal.meter import AllocationMeter
from lamina.runtime import Graphs
from lamina.sampling.chooser import Chooser
from tests.families.cases import CASES
from tests.families.harness import pair
from tests.kernels.runs import PROMPTS, begin, start, tiny
from tests.kernels.test_encoder_decoders import CASES as SOURCES
from tests.kernels.test_encoder_decoders import built
from tests.laws.toys import toy

DENSE = ["llama", "gpt2", "gemma2", "gemma3n_text", "bloom", "gpt_neox", "cohere", "apertus", "qwen3"]
MIXTURES = ["deepseek_v3", "gpt_oss", "phimoe", "longcat_flash", "llama4", "deepseek_v32", "glm_moe_dsa"]
RECURRENT = ["mamba", "mamba2", "qwen3_next", "kimi_linear", "recurrent_gemma", "rwkv", "lfm2", "falcon_h1"]


@pytest.fixture(autouse=True)
def two_threads() -> Any:
    set_threads(2)
    yield
    set_threads(None)


def native_and_plain(model: Model, **given: Any) -> tuple[Any, Any]:
    native, plain = decode_captured(begin(model, **given), native=True), decode_plain(begin(model, **given))
    assert native.how.startswith("one native program a step")
    assert (native.tokens, native.reasons) == (plain.tokens, plain.reasons)
    assert native.cache.tokens == plain.cache.tokens
    return native, plain


@pytest.mark.parametrize("family", DENSE + MIXTURES + RECURRENT)
def test_native_and_plain_steps_give_the_same(family: str) -> None:
    model = pair(family, next(iter(CASES[family])))[1]
    native, plain = (made.cache for made in native_and_plain(model, max_new_tokens=3))
    assert torch.equal(native.rewindable, plain.rewindable)
    torch.testing.assert_close(native.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])  # and plain passes go on from it
    torch.testing.assert_close(model(more, cache=native), model(more, cache=plain), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", SOURCES)
def test_native_steps_read_a_source(family: str) -> None:
    model, native, plain = built(family)
    for cache in (native, plain):
        model(torch.tensor([[0, 4, 8, 2, 1, 9, 3]]).expand(2, -1), cache=cache, logits="last")
    first = torch.tensor([3, 11])
    with Graphs(model).step(2, Chooser(), native, native=True) as step:
        step.begin(native, first, [2, 2], ())
        step.run(2)
    for _ in range(2):
        expected = model(first[:, None], cache=plain, logits="last")
        first = expected.argmax(-1)
    torch.testing.assert_close(native.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [
    {"do_sample": True, "temperature": 0.7}, {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.5}, {"eos_token_id": (17, 18)},
], ids=lambda given: ", ".join(given))  # fmt: skip
def test_tokens_are_chosen_and_ended_as_in_plain_passes(settings: dict[str, Any]) -> None:
    native_and_plain(tiny(), **({"max_new_tokens": 6} | settings))


def test_generate_uses_the_native_step_on_a_cpu_and_says_so() -> None:
    model = tiny()
    assert model.explain().splitlines()[0] == "decoding: one native program a step"
    assert model.generate(PROMPTS, 4).how == "one native program a step"


def test_a_kind_without_a_native_kernel_is_named() -> None:
    model = toy("from outside", torch.float32)
    reason = "plain passes, since layer 0 entry 'peak': there is no native kernel for Peak"
    assert model.explain().splitlines()[0] == f"decoding: {reason}"
    assert model.generate([[3, 4], [5]], 1).how == reason


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("codec", ["int8", "int6", "k5v4", "fp8"])
def test_native_steps_read_and_write_quantized_caches(family: str, codec: str) -> None:
    model = pair(family, next(iter(CASES[family])))[1]
    native, plain = (made.cache for made in native_and_plain(model, max_new_tokens=3, codec=codec))
    torch.testing.assert_close(native.logits, plain.logits, rtol=1e-4, atol=1e-4)
    more = torch.tensor([[1, 2], [3, 4]])
    torch.testing.assert_close(model(more, cache=native), model(more, cache=plain), rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_and_stores_are_as_exact_as_plain_passes() -> None:
    rounded = copy.deepcopy(tiny()).to(torch.bfloat16)
    exact = copy.deepcopy(rounded).float()
    caches = {kind: start(model)[0] for kind, model in (("exact", exact), ("plain", rounded), ("native", rounded))}
    ids = torch.tensor([3, 4])
    truth, plain = (
        model(ids[:, None], cache=caches[kind], logits="last").float()
        for kind, model in (("exact", exact), ("plain", rounded))
    )
    with rounded.graphs.step(2, Chooser(), caches["native"], native=True) as step:
        step.begin(caches["native"], ids, [1, 1], ())
        step.run(1)
    found = caches["native"].logits.float()
    assert (found - truth).abs().max() <= 2 * (plain - truth).abs().max()


def test_norms_of_queries_and_keys_may_have_weights_in_two_dtypes() -> None:
    model = copy.deepcopy(pair("qwen3", next(iter(CASES["qwen3"])))[1])
    norm = model.blocks[0].attention.q_norm
    norm.weight = torch.nn.Parameter(norm.weight.bfloat16())
    native_and_plain(model, max_new_tokens=3)


# -- any cache -------------------------------------------------------------------------------------------------------


def test_one_program_serves_two_live_caches_and_growth() -> None:
    model = tiny()
    graphs = Graphs(model)
    (a, logits), (b, _) = start(model), start(model)
    expected = decode_plain(begin(model, max_new_tokens=4)).tokens
    for cache in (a, b):
        with graphs.step(2, Chooser(), cache, native=True) as step:
            step.begin(cache, logits.argmax(-1), [4, 4], ())
            step.run(2)
            cache.reserve(2 * cache.layers[0]["attention"].slots + 1)  # new memory, elsewhere
            step.run(2)
    assert graphs.captures == 1
    assert a.tokens == b.tokens == [p + t for p, t in zip(PROMPTS, expected, strict=True)]


def test_long_rows_are_attended_in_splits() -> None:
    model = tiny()
    ids = torch.randint(0, model.vocab, (1, 1100), generator=torch.Generator().manual_seed(0))
    caches = [model.new_cache(1), model.new_cache(1)]
    for cache in caches:
        model(ids, cache=cache, logits="last")
    with model.graphs.step(1, Chooser(), caches[0], native=True) as step:
        step.begin(caches[0], torch.tensor([4]), [1], ())
        step.run(1)
    model(torch.tensor([[4]]), cache=caches[1], logits="last")
    torch.testing.assert_close(caches[0].logits, caches[1].logits, rtol=1e-4, atol=1e-5)


# -- one caller at a time, changes, errors ---------------------------------------------------------------------------


def test_two_threads_generate_at_once() -> None:
    model = tiny()
    expected, found = model.generate(PROMPTS, 12).tokens, [None, None]

    def work(i: int) -> None:
        found[i] = model.generate(PROMPTS, 12).tokens

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert found == [expected, expected]


def test_weights_that_change_in_place_are_read_again() -> None:
    model = pair("gemma2", next(iter(CASES["gemma2"])))[1]
    before = native_and_plain(model)[0]
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.5)
        assert not torch.equal(native_and_plain(model)[0].cache.logits, before.cache.logits)
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(value)


def test_an_interrupt_leaves_a_valid_cache() -> None:
    model = tiny()
    cache, logits = start(model)
    with model.graphs.step(2, Chooser(), cache, native=True) as step:
        step.begin(cache, logits.argmax(-1), [9, 9], ())
        step.capture()
        replay, left = step._replay, [2]

        def interrupted(which: int = 0) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            replay(which)

        step._replay = interrupted
        with pytest.raises(KeyboardInterrupt):
            step.run(5)
        del step._replay
    assert [len(row) for row in cache.tokens] == [len(prompt) + 2 for prompt in PROMPTS]
    expected = decode_plain(begin(model, max_new_tokens=2)).tokens
    assert cache.tokens == [p + t for p, t in zip(PROMPTS, expected, strict=True)]


def test_a_value_that_the_host_reads_cannot_be_recorded() -> None:
    class Reading(type(tiny())):  # type: ignore[misc]
        def unembed(self, x: torch.Tensor) -> torch.Tensor:
            return super().unembed(x) * float(x.sum())

    model = copy.deepcopy(tiny())
    model.__class__ = Reading
    with pytest.raises(CaptureError, match="reads values of a step on the host"):
        cache, logits = start(model)
        with model.graphs.step(2, Chooser(), cache, native=True) as step:
            step.begin(cache, logits.argmax(-1), [1, 1], ())
            step.run(1)
    assert "reads values of a step on the host" in model.generate(PROMPTS, 1).how


def test_the_number_of_threads_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads() == 2
    set_threads(None)
    assert threads() == torch.get_num_threads() == 1
    monkeypatch.setenv("LAMINA_THREADS", "3")
    assert threads() == 3
    with pytest.raises(lamina.errors.InputError, match="set_threads"):
        set_threads(0)


@pytest.mark.parametrize("mode", [Recorder, AllocationMeter])
def test_watching_operations_does_not_import_the_compiler(mode: type) -> None:
    """PyTorch wraps `__torch_dispatch__` in a function that imports torch._dynamo, unless a mode declines."""
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")  # type: ignore[attr-defined]
