"""Captured steps and passes over every kind of attention entry: another layer's keys, a source, biases and sinks.

The kinds differ in what their kernels store and where new tokens are read, so each goes through steps of one token,
passes of several of which some are accepted, codecs, and pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lamina
from lamina.attention.window import Full, Sliding, Window
from lamina.cache import Memory
from lamina.cache.codec.codec import Codec
from lamina.config import Config
from lamina.errors import CaptureError
from lamina.model import Model
from lamina.models.t5 import T5
from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
from lamina.runtime import Graphs
from lamina.runtime.eligibility import why_not_read
from lamina.sampling.chooser import Chooser
from tests.kernels.passes import compared
from tests.kernels.test_fusion import launched
from tests.laws.toys import HEADS, KV_HEADS, VOCAB, WIDTH, Attend, AttendCross, AttendShared, EncoderDecoder, Toy, heads

pytestmark = [
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning"),
]
F32 = torch.float32
PROMPTS, COUNTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 0, 0, 0, 0, 0]], [7, 2]


class Scored(Attend):
    """Attention whose scores get a bias, or whose softmax gets sinks."""

    def __init__(self, window: Window, bias: nn.Module | None = None) -> None:
        super().__init__(window)
        self.bias, self.sinks = bias, nn.Parameter(torch.zeros(HEADS)) if bias is None else None

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        placed = x + shared
        q, k, v = heads(self.q(placed), HEADS), heads(self.k(placed), KV_HEADS), heads(self.v(x), KV_HEADS)
        out = memory.attend(q, k, v, scale=1.0, bias=self.bias, sinks=self.sinks)
        return x + self.out(out.transpose(1, 2).flatten(2))


def sharing() -> Model:
    return Toy(Attend(), Attend(Sliding(4)), AttendShared(0), AttendShared(1), dtype=F32)


def biased() -> Model:
    near = RelativeBias(HEADS, 4, 5, both_ways=False)
    return Toy(Scored(Full(), AlibiBias(alibi_slopes(HEADS))), Scored(Sliding(6), near), dtype=F32)


MODELS: dict[str, Callable[[], Model]] = {
    "shared": sharing,
    "cross": lambda: EncoderDecoder(AttendCross(), dtype=F32),
    "biases": biased,
    "sinks and windows": lambda: Toy(Scored(Sliding(4, keep=1)), Scored(Full()), dtype=F32),
}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"codec": "int8"},
    "values alone": {"codec": Codec(values=4)},
    "pages": {"pool": 4},
}
CASES = [
    *(("shared", how) for how in HOW),
    *(("cross", how) for how in HOW if how != "pages"),  # sources are never in pages
    ("biases", "plain"),
    ("biases", "pages"),
    *(("sinks and windows", how) for how in ("plain", "int8", "pages")),
]


def started(model: Model, codec: Any = None, pool: int | None = None) -> lamina.Cache:
    """A cache that has read the prompts, and the sources where the model reads some."""
    made = None if pool is None else lamina.Pool(model, page=pool)
    cache = model.new_cache(rows=2, codec=codec, pool=made)
    if isinstance(model, EncoderDecoder):
        cache.attach(model.encode([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]], [5, 2]))
    model(torch.tensor(PROMPTS), cache=cache, counts=COUNTS, logits="last")
    return cache.reserve(24)


def greedy(model: Model, cache: lamina.Cache, ids: Tensor, tokens: int) -> Tensor:
    """Plain passes of one token each; -> the logits after the last."""
    for _ in range(tokens):
        logits = model(ids[:, None], cache=cache, logits="last")
        assert logits is not None
        ids = logits.argmax(-1)
    return logits


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_captured_steps_and_passes_give_what_plain_ones_give(kind: str, how: str) -> None:
    model = MODELS[kind]()
    captured, plain = started(model, **HOW[how]), started(model, **HOW[how])
    assert why_not_read(captured) is None
    first = torch.tensor([3, 11])
    with Graphs(model).step(2, Chooser(), captured) as step:
        step.begin(captured, first, [1, 1], ())
        step.run(1)
    expected = greedy(model, plain, first, 1)
    assert captured.tokens == plain.tokens
    torch.testing.assert_close(captured.logits, expected, rtol=1e-4, atol=1e-4)
    compared(model, captured, plain, (3,), vocab=VOCAB)


def test_t5_is_captured_with_its_relative_bias_and_its_source() -> None:
    torch.manual_seed(0)
    t5 = dict(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, relative_attention_num_buckets=4,
              relative_attention_max_distance=5, layer_norm_epsilon=1e-6, model_type="t5")  # fmt: skip
    model = T5.build(Config(t5)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.4)
    captured, plain = (model.new_cache(rows=2, source=model.encode([[5, 6, 7], [8, 9, 1]])) for _ in range(2))
    for cache in (captured, plain):
        model(torch.tensor([[0, 4, 8, 2, 1, 9, 3]]).expand(2, -1), cache=cache, logits="last")
    first = torch.tensor([3, 11])
    with Graphs(model).step(2, Chooser(), captured) as step:
        step.begin(captured, first, [2, 2], ())
        step.run(2)
    expected = greedy(model, plain, first, 2)
    assert captured.tokens == plain.tokens
    torch.testing.assert_close(captured.logits, expected, rtol=1e-4, atol=1e-4)
    assert model.fusion_plan.reason is None


@pytest.mark.parametrize(("kind", "attends"), [("shared", 4), ("cross", 2), ("biases", 2)])
def test_every_attention_of_a_step_is_one_launch(kind: str, attends: int) -> None:
    model = MODELS[kind]()
    cache = started(model)
    with Graphs(model).step(2, Chooser(), cache) as step, launched(runs=False) as launches:
        step.begin(cache, torch.tensor([3, 11]), [1, 1], ())
        step.run(1)
    assert [name for name, _ in launches] == ["_positions", *["_attend_token"] * attends, "_finish"]


def test_a_step_serves_caches_with_sources_of_different_lengths() -> None:
    model = MODELS["cross"]()
    assert isinstance(model, EncoderDecoder)
    graphs, first = Graphs(model), torch.tensor([3])
    for source in ([[3, 1, 4, 1, 5]], [[9, 2]]):
        captured, plain = (model.new_cache(rows=1, source=model.encode(source)) for _ in range(2))
        with graphs.step(1, Chooser(), captured) as step:
            step.begin(captured, first, [2], ())
            step.run(2)
        torch.testing.assert_close(captured.logits, greedy(model, plain, first, 2), rtol=1e-4, atol=1e-4)
    assert graphs.captures == 1


def test_more_query_heads_than_a_program_takes_read_another_layer_in_passes_of_several_tokens() -> None:
    class Wide(AttendShared):
        """More query heads than the layer it reads."""

        def __init__(self) -> None:
            super().__init__(0)
            self.q, self.out = nn.Linear(WIDTH, 40 * 4), nn.Linear(40 * 4, WIDTH)

        def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
            seen = memory.attend(heads(self.q(x + shared), 40), scale=1.0)
            return x + self.out(seen.transpose(1, 2).flatten(2))

    model = Toy(Attend(), Wide(), dtype=F32)
    captured, plain = started(model), started(model)
    compared(model, captured, plain, (2,), vocab=VOCAB)
    with Graphs(model).step(2, Chooser(), captured) as step:
        step.begin(captured, torch.tensor([3, 11]), [1, 1], ())
        with pytest.raises(CaptureError, match="40 query heads that read another layer's 2 key heads"):
            step.run(1)
