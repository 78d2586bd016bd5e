"""Every backend against the reference, on random inputs of every kind of view."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from lamina.attention import (
    BACKENDS,
    Chunked,
    Full,
    Sliding,
    View,
    attention,
    probabilities,
    reference_attention,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

WINDOWS = [Full(), Sliding(5), Sliding(4, keep=2), Chunked(6)]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def alibi(head: torch.Tensor, q_pos: torch.Tensor, kv_pos: torch.Tensor) -> torch.Tensor:
    return -SLOPES[head] * (q_pos - kv_pos).abs()


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "bias": {"bias": alibi},
    "all": {"softcap": 3.0, "sinks": torch.tensor([1.0, 0.0, -2.0, 4.0]), "bias": alibi},
}
# sdpa changes no scores; each flex call compiles, so it takes the two ends only.
CASES = [("sdpa", "plain"), *(("eager", extra) for extra in EXTRAS), ("flex", "plain"), ("flex", "all")]


def tensors(view: View, Hq: int = 4, Hk: int = 2, D: int = 8, Dv: int = 8, seed: int = 0):
    """Random q, k, v for a view, with NaN in the slots that hold no token."""
    B, T, S = view.shape
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Hq, T, D, generator=make)
    k = torch.randn(B, Hk, S, D, generator=make)
    v = torch.randn(B, Hk, S, Dv, generator=make)
    hole = ~view.exists()
    return q, k.masked_fill(hole, torch.nan), v.masked_fill(hole, torch.nan)


def ragged(window, T: int, S: int = 16, lengths=(13, 5, 2), **kwargs) -> View:
    """Rows of different length in slots of random order, unused slots at -1; queries are the last T."""
    make = torch.Generator().manual_seed(S)
    kv = torch.stack([torch.randperm(S, generator=make) for _ in lengths])
    length = torch.tensor(lengths)[:, None]
    return View(length - T + torch.arange(T), torch.where(kv < length, kv, -1), window, **kwargs)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def check(view: View, backend: str, limit: float = 2e-6, scale: float = 0.4, **extra) -> None:
    q, k, v = tensors(view)
    found = attention(q, k, v, view, scale=scale, backend=backend, **extra)
    assert found.dtype == q.dtype
    assert error(found, reference_attention(q, k, v, view, scale=scale, **extra)) < limit


@pytest.mark.parametrize(("backend", "extra"), CASES)
@pytest.mark.parametrize("T", [1, 4])
def test_ragged_rows_with_nan_in_unused_slots(backend: str, extra: str, T: int) -> None:
    for window in WINDOWS[2:] if backend == "flex" else WINDOWS:
        check(ragged(window, T), backend, **EXTRAS[extra])


@pytest.mark.parametrize(("backend", "extra"), CASES)
def test_exact_views_of_every_lowering(backend: str, extra: str) -> None:
    for T, S, window in [
        (1, 7, Full()),
        (7, 7, Full()),
        (3, 7, Full()),
        (1, 1, Chunked(3)),
        (7, 7, Sliding(3, keep=1)),
    ]:
        keys = torch.arange(2, 2 + S).expand(2, S)
        check(View(keys[:, S - T :], keys, window, exact=True), backend, **EXTRAS[extra])


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlays_segments_spans_rules_and_bidirectional(backend: str) -> None:
    at = torch.arange(9).expand(2, 9)
    part, span = at // 4, torch.where((at > 1) & (at < 7), 0, -1)
    check(View(at, at, Full(), q_segments=part, kv_segments=part), backend)
    check(View(at, at, Sliding(2), q_spans=span, kv_spans=span), backend)
    check(View(at, at, Full(), also=lambda row, q, kv: kv != row, or_else=lambda row, q, kv: kv == 8), backend)
    check(View(at, at, Full(), causal=False, exact=True), backend)
    check(View(at[:, :4], at, Full(), causal=False, full=True), backend)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_shapes_windows_and_holes(data: st.DataObject) -> None:
    B, T, S = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9)))
    Hk, G, D, Dv = data.draw(st.tuples(*[st.integers(1, 3)] * 2, st.integers(1, 9), st.integers(1, 9)))
    seed = data.draw(st.integers(0, 1000))
    make = torch.Generator().manual_seed(seed)
    q_pos = torch.randint(-1, 10, (B, T), generator=make)
    kv_pos = torch.randint(-1, 10, (B, S), generator=make)
    view = View(q_pos, kv_pos, data.draw(st.sampled_from(WINDOWS)), causal=data.draw(st.booleans()))
    q, k, v = tensors(view, Hk * G, Hk, D, Dv, seed)
    extra = {}
    if data.draw(st.booleans()):
        extra["sinks"] = torch.randn(Hk * G, generator=make)
    expected = reference_attention(q, k, v, view, scale=0.7, **extra)
    for backend in ["eager"] if extra else ["sdpa", "eager"]:
        found = attention(q, k, v, view, scale=0.7, backend=backend, **extra)
        assert torch.allclose(found.double(), expected, atol=2e-5)


@pytest.mark.parametrize(("backend", "extra"), CASES)
@pytest.mark.parametrize("T", [1, 3])
def test_a_query_that_sees_nothing_gives_zeros(backend: str, extra: str, T: int) -> None:
    view = ragged(Full(), T, lengths=(9, 0))
    q, k, v = tensors(view)
    out = attention(q, k, v, view, scale=0.4, backend=backend, **EXTRAS[extra])
    assert torch.isfinite(out).all()
    assert not out[1].any()
    assert out[0].any()


@pytest.mark.parametrize(("backend", "extra"), CASES)
@pytest.mark.parametrize("T", [1, 6])
def test_bfloat16_errs_at_most_twice_as_much_as_the_plain_computation(backend: str, extra: str, T: int) -> None:
    view = ragged(Sliding(40), T, S=64, lengths=(60, 33, 9))
    q, k, v = (x.bfloat16() for x in tensors(view, D=32, Dv=32))
    expected = reference_attention(q, k, v, view, scale=0.4, **EXTRAS[extra])
    plain = reference_attention(q, k, v, view, scale=0.4, **EXTRAS[extra], dtype=torch.bfloat16)
    found = attention(q, k, v, view, scale=0.4, backend=backend, **EXTRAS[extra])
    assert found.dtype == torch.bfloat16
    assert error(found, expected) <= 2 * error(plain, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("T", [1, 5])
def test_values_may_be_a_part_of_the_keys_and_narrower(backend: str, exact: bool, T: int) -> None:
    keys = torch.arange(5).expand(2, 5)
    view = View(keys[:, 5 - T :], keys, Full(), exact=exact)
    q, k, _ = tensors(view, Hq=4, Hk=1, D=24)
    v = k[..., :16]
    before = k.clone()
    out = attention(q, k, v, view, scale=0.2, backend=backend)
    assert out.shape == (2, 4, T, 16)
    assert error(out, reference_attention(q, k, v, view, scale=0.2)) < 2e-6
    assert torch.equal(k, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries_or_no_keys_give_an_empty_or_zero_output(backend: str) -> None:
    at = torch.arange(3)[None]
    for view in (
        View(at[:, :0], at, Full()),
        View(at, at[:, :0], Full()),
        View(at[:, :0], at[:, :0], Full()),
    ):
        q, k, v = tensors(view, Dv=5)
        out = attention(q, k, v, view, scale=1.0, backend=backend)
        assert out.shape == (1, 4, view.shape[1], 5)
        assert not out.any()
        assert torch.equal(reference_attention(q, k, v, view, scale=1.0), out.double())


@pytest.mark.parametrize("backend", ["sdpa", "eager"])  # FlexAttention has no gradient on the CPU
def test_gradients_are_those_of_the_reference_and_finite_beside_holes_and_blind_queries(backend: str) -> None:
    view = ragged(Sliding(4), 3, lengths=(9, 4, 0))
    inputs = [x.nan_to_num(0.0) for x in tensors(view)]
    grads = []
    for run in (attention, reference_attention):
        leaves = [x.clone().requires_grad_() for x in inputs]
        extra = {"backend": backend} if run is attention else {"dtype": torch.float32}
        run(*leaves, view, scale=0.4, **extra).square().sum().backward()
        grads.append([x.grad for x in leaves])
    for found, expected in zip(*grads, strict=True):
        assert torch.isfinite(found).all()
        assert torch.allclose(found, expected, atol=1e-4)


def test_probabilities_are_the_shares_that_eager_takes() -> None:
    view = ragged(Sliding(4, keep=1), 3, lengths=(9, 4, 0))
    q, k, v = tensors(view)
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    shares = probabilities(q, k, view, scale=0.4)
    assert shares.shape == (3, 4, 3, 16)
    assert not shares[~view.mask().expand_as(shares)].any()
    assert torch.allclose(shares.sum(-1), (~view.blind()[..., 0]).float().expand(3, 4, 3))
    out = torch.einsum("bhts,bhsd->bhtd", shares, v.repeat_interleave(2, dim=1))
    assert torch.allclose(out, attention(q, k, v, view, scale=0.4), atol=1e-6)
    sunk = probabilities(q, k, view, scale=0.4, sinks=torch.zeros(4)).sum(-1)
    assert (sunk < 1).all()


def test_scores_are_changed_only_where_the_backend_can() -> None:
    calls: list[str] = []
    view = ragged(Full(), 2)
    q, k, v = tensors(view)

    def spy(name: str):
        return lambda *args, **kwargs: calls.append(name) or q

    kept = dict(BACKENDS)
    try:
        BACKENDS.update({name: spy(name) for name in kept})
        for extra in EXTRAS.values():
            attention(q, k, v, view, scale=1.0, **extra)
    finally:
        BACKENDS.update(kept)
    assert calls == ["sdpa", "eager", "eager", "eager", "eager"]
    with pytest.raises(ValueError, match="'sdpa' cannot change scores"):
        attention(q, k, v, view, scale=1.0, softcap=1.0, backend="sdpa")


def test_the_bias_is_called_with_the_documented_shapes_and_no_negative_key_position() -> None:
    seen = {}

    def bias(head, q_pos, kv_pos):
        seen.update(head=head, q=q_pos, kv=kv_pos)
        return torch.zeros(())

    view = ragged(Full(), 2)
    q, k, v = tensors(view)
    attention(q, k, v, view, scale=1.0, bias=bias)
    assert seen["head"].flatten().tolist() == [0, 1, 2, 3]
    assert (seen["head"].shape, seen["q"].shape, seen["kv"].shape) == ((4, 1, 1), (3, 1, 2, 1), (3, 1, 1, 16))
    assert seen["kv"].min() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "fast"}, "unknown attention backend 'fast': known are eager, flex, sdpa"),
        ({"q": torch.zeros(3, 4, 8)}, r"q, k and v are \[B, H, tokens, D\], not \[3, 4, 8\]"),
        ({"q": torch.zeros(3, 4, 5, 8)}, r"q is \[3, 4, 5, 8\], but the view has 3 rows and 2 queries"),
        ({"k": torch.zeros(3, 2, 9, 8)}, r"k is \[3, 2, 9, 8\], but the view has 3 rows and 16 slots"),
        ({"v": torch.zeros(3, 1, 16, 8)}, r"v is \[3, 1, 16, 8\] and k \[3, 2, 16, 8\]"),
        ({"q": torch.zeros(3, 4, 2, 6)}, "q has head dim 6 and k 8"),
        ({"q": torch.zeros(3, 5, 2, 8)}, "5 query heads cannot share 2 key heads evenly"),
        ({"softcap": 0.0}, "softcap=0.0: a cap is positive"),
        ({"sinks": torch.zeros(3)}, r"sinks is \[3\]: it must hold one logit for each of the 4 query heads"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict, message: str) -> None:
    view = ragged(Full(), 2)
    q, k, v = tensors(view)
    call = {"q": q, "k": k, "v": v, "view": view, "scale": 1.0} | change
    with pytest.raises(ValueError, match=message):
        attention(**call)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 3])
def test_one_graph_serves_all_positions_and_the_view_is_made_inside_it(backend: str, T: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    extra = {} if backend == "sdpa" else EXTRAS["all"]
    S = 12

    def make(lengths: torch.Tensor) -> View:
        slot = torch.arange(S)
        last = lengths[:, None] - 1
        kv = last - (last - slot) % S
        return View(last - T + 1 + torch.arange(T), torch.where(kv < 0, -1, kv), Sliding(S - T, keep=1))

    def two_layers(q, k, v, lengths):
        view = make(lengths)
        q = attention(q, k, v, view, scale=0.4, backend=backend, **extra)
        return attention(q, k, v, view, scale=0.4, backend=backend, **extra)

    compiled = torch.compile(two_layers, fullgraph=True, backend=counter)
    for step in (3, 7, 12, 13, 40):
        lengths = torch.tensor([step, step + 5])
        view = make(lengths)
        q, k, v = tensors(view, seed=step)
        middle = reference_attention(q, k, v, view, scale=0.4, **extra)
        expected = reference_attention(middle, k, v, view, scale=0.4, **extra)
        with torch.no_grad():
            assert error(compiled(q, k, v, lengths), expected) < 2e-6
    assert counter.frame_count == 1


@pytest.mark.parametrize("T", [1, 6])
def test_exact_views_compile_to_one_graph(T: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v, start):
        keys = start[:, None] + torch.arange(6)
        return attention(q, k, v, View(keys[:, 6 - T :], keys, Full(), exact=True), scale=0.4)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for begin in (0, 5, 9):
        keys = torch.arange(6)[None]
        q, k, v = tensors(View(keys[:, 6 - T :], keys, Full()), seed=begin)
        start = torch.tensor([begin])
        assert error(compiled(q, k, v, start), run(q, k, v, start).double()) < 2e-6
    assert counter.frame_count == 1
