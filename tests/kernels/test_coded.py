"""Decode attention over codes against the reference over what they decode to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lamina.attention import Chunked, Full, Sliding, Window
from lamina.attention.bias import kernel_form
from lamina.cache.codec.codec import Codec
from lamina.errors import InputError
from lamina.kernels.attention.mla import decode_latent
from lamina.kernels.attention.mla_project import out_of_latent
from lamina.kernels.attention.quantized import decode_codes
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.quant.encode import Side, encode
from lamina.nn import AlibiBias, alibi_slopes
from tests.kernels.stores import Held, Packed, error
from tests.kernels.test_attend import relative
from tests.kernels.test_codes import new_tokens, sides

SMALL = Tiling(block=16, warps=1, stages=2)
ALL = ["int8", "int6", "int5", "int4", "fp8", "k8v4"]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


def run(
    codec: str | Codec,
    window: Window,
    lengths: list[int],
    T: int,
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (32, 32),
    counts: list[int] | None = None,
    slack: int = 0,
    ring: bool = True,
    splits: int = 3,
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    bias: Any = None,
) -> tuple[float, float]:
    """The error of the kernel, and that of the plain computation over decoded numbers in the same number format."""
    torch.manual_seed(sum(lengths) + T)
    held = Held.random(window, lengths, heads[1], dims, slots=96, counts=counts, slack=slack, dtype=dtype, ring=ring)
    packed = Packed(held, codec)
    q, k, v = new_tokens(held, T, heads, dims, dtype)
    how: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sinks": torch.randn(heads[0]) if sinks else None}
    write = T == 1 or held.layout.ring is None  # several tokens go into a ring when they are accepted
    truth = packed.seen.attend(q, [packed.through("k", k), packed.through("v", v)], bias=bias, **how)
    plain = packed.seen.attend(q, [packed.through("k", k), packed.through("v", v)], dtype=dtype, bias=bias, **how)
    coded = encode(q, k, v, packed.table(), *sides(packed, dims), write=write)
    how |= dict(most_parts=splits, shape=SMALL, least=16, bias=kernel_form(bias))
    out = decode_codes(coded, packed.table(), window, dtype, **how)
    assert out.shape == (len(lengths), heads[0], T, dims[1]) and out.dtype == dtype
    assert out.isfinite().all(), "padding and unused slots never reach an output"
    return error(out, truth, held.real(T)), error(plain, truth, held.real(T))


@pytest.mark.parametrize("codec", ALL)
def test_a_line_with_ragged_rows_equals_the_reference(codec: str) -> None:
    ours, _ = run(codec, Full(), [0, 41], 1, heads=(2, 1), dims=(64, 32))
    assert ours < 1e-5


@pytest.mark.parametrize(("window", "T"), [(Sliding(20), 4), (Sliding(20, keep=3), 1), (Chunked(16), 2)], ids=str)
def test_a_ring_equals_the_reference_before_at_and_after_the_wrap(window: Window, T: int) -> None:
    for codec in ("int4", "fp8"):
        ours, _ = run(codec, window, [0, 20, 75] if T > 1 else [2, 20, 75], T, splits=2)
        assert ours < 1e-5


@pytest.mark.parametrize(("codec", "dims"), [("int8", (80, 9)), ("int4", (6, 42)), ("int5", (9, 80)), ("fp8", (7, 40))])
def test_head_dims_need_not_be_multiples_of_32_nor_of_anything(codec: str, dims: tuple[int, int]) -> None:
    ours, _ = run(codec, Full(), [5, 20], 2, dims=dims, splits=1)
    assert ours < 1e-5


@pytest.mark.parametrize("codec", [Codec(8, "plain"), Codec("plain", 4)], ids=str)
def test_either_side_may_be_plain(codec: Codec) -> None:
    ours, _ = run(codec, Full(), [0, 40], 2, dims=(40, 64))
    assert ours < 1e-5


@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_windows_lengths_and_counts_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([Full(), Sliding(rng.randint(1, 30), keep=rng.randint(0, 5)), Chunked(rng.randint(1, 30))])
    T, rows, key_heads = rng.randint(1, 4), rng.randint(1, 2), rng.randint(1, 2)
    ours, _ = run(
        rng.choice(ALL),
        window,
        [rng.choice([0, rng.randint(1, 60)]) for _ in range(rows)],
        T,
        heads=(key_heads * rng.randint(1, 5), key_heads),
        dims=(rng.choice([32, 40, 64]), rng.choice([32, 48, 96])),
        counts=rng.choice([None, [rng.randint(0, T) for _ in range(rows)]]),
        slack=rng.randint(0, 3),
        splits=rng.randint(1, 6),
        softcap=rng.choice([None, 3.0]),
        sinks=rng.random() < 0.5,
        ring=rng.random() < 0.7,
    )
    assert ours < 1e-5


def test_softcap_sinks_padding_and_many_queries() -> None:
    ours, _ = run("int4", Full(), [0, 40], 3, heads=(6, 1), counts=[2, 3], softcap=2.0, sinks=True)  # 18 queries
    assert ours < 1e-5


def test_biases_by_distance_are_added_over_codes_too() -> None:
    ours, _ = run("int8", Full(), [0, 40], 2, heads=(3, 1), softcap=2.0, bias=AlibiBias(alibi_slopes(3)))
    assert ours < 1e-5
    ours, _ = run("int4", Sliding(20, keep=3), [2, 75], 1, heads=(2, 1), sinks=True, bias=relative(2))
    assert ours < 1e-5


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("int8", torch.float16), ("int4", torch.bfloat16), ("int5", torch.float16), ("fp8", torch.bfloat16)],
    ids=str,
)
def test_low_precision_is_within_twice_the_error_of_the_plain_computation(codec: str, dtype: torch.dtype) -> None:
    ours, plain = run(codec, Full(), [1, 40], 2, dtype=dtype, dims=(64, 64))
    assert ours <= 2 * plain + 1e-3


@pytest.mark.parametrize(("codec", "rank"), [("int8", 32), ("int4", 64), ("int5", 20), ("fp8", 24), ("int4", 21)])
def test_latents_in_codes_equal_the_reference(codec: str, rank: int) -> None:
    torch.manual_seed(0)
    T, H, D = 2, 3, rank + 32 if rank % 32 == 0 else rank + 8
    held = Held.random(Full(), [0, 37], 1, (D,), slots=64, counts=[2, 1])
    packed = Packed(held, codec, rotated=False, has_mean=False)
    new = torch.randn(2, 1, T, D).masked_fill(~held.real(T)[:, None, :, None], float("nan"))
    q = torch.randn(2, H, T, D)
    seen = packed.through("k", new)
    both = Held(
        [packed.seen.fields[0], packed.seen.fields[0][..., :rank]], held.layout, Full(), held.lengths, held.counts
    )
    truth = both.attend(q, [seen, seen[..., :rank]], scale=0.3)
    coded = encode(new, new, None, packed.table(), Side.of(packed.formats["k"], D), write=True)
    parts = decode_latent(q, coded, packed.table(), rank=rank, scale=0.3, most_splits=2, shape=SMALL, least=16)
    up = torch.eye(rank).expand(H, rank, rank).contiguous()
    assert error(out_of_latent(parts, up, packed.table()), truth, held.real(T)) < 1e-5


def test_more_than_16_tokens_are_refused() -> None:
    held = Held.random(Full(), [0], 1, (32, 32), slots=32, counts=[0])
    packed = Packed(held, "int8")
    new = new_tokens(held, 17, (1, 1), (32, 32), torch.float32)
    coded = encode(*new, packed.table(), *sides(packed, (32, 32)), write=True)
    with pytest.raises(InputError, match="17 new tokens"):
        decode_codes(coded, packed.table(), Full(), torch.float32, scale=1.0)
