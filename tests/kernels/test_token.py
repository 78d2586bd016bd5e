"""One new token a row in one launch, against turning, storing and attending one after the other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention import Chunked, Full, Sliding, Window
from lamina.attention.bias import kernel_form
from lamina.cache.plain_backend import PLAIN
from lamina.cache.step import Step
from lamina.kernels.attention import decode_fused
from lamina.kernels.attention.decode_fused import attend_stored, attend_token, single_plan, supports
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.limits import CARDS
from lamina.nn import AlibiBias, RMSNorm, alibi_slopes
from tests.kernels.stores import Held, error
from tests.kernels.test_attend import relative
from tests.kernels.test_rope import norm_of, rope_of, same

SMALL = Tiling(block=16, warps=4, stages=2)


def run(
    window: Window,
    lengths: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    pairs: int | None = 8,
    neighbours: bool = False,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_last: bool = False,
    factor: bool = False,
    gated: bool = False,
    sinks: bool = False,
    bias: Any = None,
    softcap: float | None = None,
    counts: list[int] | None = None,
    slack: int = 0,
    ring: bool = True,
    splits: int = 3,
    dtype: torch.dtype = torch.float32,
    shape: Tiling | None = SMALL,
) -> tuple[float, float]:
    """The error of the kernel, and that of the plain computation in the same number format; stores are compared."""
    torch.manual_seed(sum(lengths))
    (Hq, Hk), (D, Dv), B = heads, dims, len(lengths)
    held = Held.random(window, lengths, Hk, dims, slots=96, counts=counts, slack=slack, dtype=dtype, ring=ring)
    real = held.real(1)

    def fresh(count: int, dim: int) -> Tensor:
        return (
            torch.randn(B, 1, count, dim).masked_fill(~real[:, :, None, None], float("nan")).to(dtype).transpose(1, 2)
        )

    q, k = fresh(Hq + Hk, D).split([Hq, Hk], dim=1)
    v, gate = fresh(Hk, Dv), fresh(Hq, Dv) if gated else None
    rope = None if pairs is None else rope_of(held, 1, pairs)
    by = torch.rand(B, 1) + 0.5 if factor else None
    how: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": torch.randn(Hq) if sinks else None}

    step = Step.alone([], (B, 1), torch.device("cpu"))
    turn: dict[str, Any] = {"rope": rope, "neighbours": neighbours, "norms_last": norms_last}

    def attended(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kind = q.dtype if dtype != torch.float64 else dtype
        turned_q = PLAIN.norm_and_rotate(step, q.to(kind), norm=norms and norms[0], **turn)
        turned_k = PLAIN.norm_and_rotate(step, k.to(kind), norm=norms and norms[1], **turn)
        if by is not None:
            turned_q = (turned_q * by[:, None, :, None]).to(turned_q.dtype)
        out = held.attend(turned_q, [turned_k, v], dtype=dtype, bias=bias, **how)
        return out if gate is None else out * gate.to(out.dtype).sigmoid(), turned_k.to(q.dtype)

    truth, new_keys = attended(torch.float64)
    stores = held.after([new_keys, v])
    plain, _ = attended(dtype)
    out = attend_token(
        q, k, v, table=held.table(), window=window, norms=norms, factor=by, gate=gate, most_parts=splits, shape=shape,
        least=16, bias=kernel_form(bias), **turn, **how,
    )  # fmt: skip
    assert supports(q, k, v) and out.shape == (B, Hq, 1, Dv)
    assert out.isfinite().all(), "padding and unused slots never reach an output"
    same(held, stores)
    return error(out, truth, real), error(plain, truth, real)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("pairs", [None, 8, 16])
def test_ragged_rows_of_a_line(splits: int, pairs: int | None) -> None:
    assert run(Full(), [0, 1, 16, 77], splits=splits, pairs=pairs)[0] < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_one_query_per_program(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_fused, "single_plan", lambda *_: (Tiling(16, 4, 1), 2, 16))
    for length in (0, 16, 77):
        how: dict[str, Any] = dict(heads=(2, 2), pairs=None, splits=splits, shape=None)
        assert run(Full(), [length], dims=(32, 24), **how)[0] < 1e-5
        assert run(Sliding(20, keep=3), [length], **how, gated=True, sinks=True, softcap=2.0)[0] < 1e-5
    got, plain = run(Full(), [77], **how, dtype=torch.bfloat16)
    assert got < 2 * plain


def test_a_program_has_one_query_where_one_row_has_as_many_key_heads_and_they_are_few() -> None:
    limits, dtype = CARDS[90], torch.bfloat16
    assert single_plan(64, 64, dtype, 20, limits) == (Tiling(256, 4, 1), 2, 256)
    assert single_plan(64, 80, dtype, 20, limits) is None and single_plan(64, 64, dtype, 40, limits) is None


@pytest.mark.parametrize("window", [Sliding(20), Sliding(20, keep=3), Chunked(24)], ids=str)
@pytest.mark.parametrize("slack", [0, 3])
def test_rings_before_at_and_after_the_wrap(window: Window, slack: int) -> None:
    assert run(window, [0, 2, 19, 20, 24, 25, 90], slack=slack)[0] < 1e-5


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("plus_one", "weight"), [(False, True), (True, True), (False, False)])
def test_norms_of_heads(last: bool, plus_one: bool, weight: bool) -> None:
    norms = norm_of(32, plus_one, weight), norm_of(32, plus_one, weight)
    assert run(Full(), [3, 40], norms=norms, norms_last=last)[0] < 1e-5


def test_neighbours_factors_gates_sinks_and_softcap() -> None:
    assert run(Full(), [0, 40], neighbours=True, pairs=16)[0] < 1e-5
    assert run(Full(), [0, 40], factor=True)[0] < 1e-5
    for splits in (1, 4):
        assert run(Full(), [0, 40], gated=True, splits=splits)[0] < 1e-5
        assert run(Full(), [0, 40], sinks=True, softcap=2.0, splits=splits)[0] < 1e-5


@pytest.mark.parametrize("make", [lambda heads: AlibiBias(alibi_slopes(heads)), relative], ids=["alibi", "relative"])
def test_a_bias_by_distance_is_added_to_the_scores(make: Any) -> None:
    assert run(Full(), [0, 40], softcap=2.0, bias=make(4))[0] < 1e-5
    assert run(Sliding(20, keep=3), [2, 90], heads=(3, 1), pairs=None, bias=make(3))[0] < 1e-5


@pytest.mark.parametrize("window", [Full(), Sliding(11, keep=2)], ids=str)
def test_a_layer_that_reads_what_another_has_stored_sees_the_new_token(window: Window) -> None:
    torch.manual_seed(0)
    held = Held.random(window, [0, 5, 40, 31], 2, (16, 24), slots=48, counts=[1, 1, 1, 0])
    q, k, v = (torch.randn(4, count, 1, dim) for count, dim in ((4, 16), (2, 16), (2, 24)))
    norms, rope = (norm_of(16, False, True), norm_of(16, False, True)), rope_of(held, 1, 4)
    how: dict[str, Any] = dict(scale=0.3, rope=rope, norms=norms, shape=SMALL, most_parts=3, least=16)
    expected = attend_token(q, k, v, table=held.table(), window=window, **how)  # stores the new token
    stores = [field.clone() for field in held.fields]
    found = attend_stored(q, held.table(), 2, 24, window, new=True, **how)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    same(held, stores)


@pytest.mark.parametrize("window", [Sliding(20), Sliding(20, keep=3)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (112, 192)], ids=str)
def test_sinks_with_windows_and_wide_heads(window: Window, dims: tuple[int, int]) -> None:
    assert run(window, [0, 19, 75], heads=(8, 1), dims=dims, pairs=dims[0] // 2, sinks=True)[0] < 1e-5


def test_a_row_that_takes_no_part_stays_as_it_is() -> None:
    for splits in (1, 3):
        assert run(Full(), [5, 40, 0], counts=[1, 0, 0], splits=splits)[0] < 1e-5
    assert run(Sliding(8), [5, 40], counts=[0, 1])[0] < 1e-5


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_windows_and_lengths(seed: int) -> None:
    draw = random.Random(seed)
    window = draw.choice([Full(), Sliding(draw.randint(1, 30)), Chunked(draw.randint(1, 30))])
    key_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 8])
    dims = draw.choice([16, 24, 32, 80]), draw.choice([16, 40, 64])
    lengths = [draw.randint(0, 90) for _ in range(draw.randint(1, 4))]
    ours, _ = run(
        window, lengths, heads=(key_heads * group, key_heads), dims=dims,
        pairs=draw.choice([None, 4, dims[0] // 2]), ring=draw.random() < 0.7, splits=draw.randint(1, 6),
    )  # fmt: skip
    assert ours < 1e-5


def test_low_precision_is_within_twice_the_error_of_the_plain_computation() -> None:
    ours, plain = run(Full(), [3, 77], dtype=torch.float16)
    assert ours <= 2 * plain


def test_several_tokens_are_for_another_kernel() -> None:
    assert not supports(torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8))
    assert not supports(torch.zeros(1, 32, 1, 8), torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
