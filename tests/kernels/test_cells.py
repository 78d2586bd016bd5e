"""Kernels over pages do what they do over stores that lie in one piece, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.attention import Chunked, Full, Sliding, Window
from lamina.kernels.attention.decode import decode_attention
from lamina.kernels.attention.decode_fused import attend_token
from lamina.kernels.attention.mla import decode_latent
from lamina.kernels.attention.mla_project import into_latent, out_of_latent
from lamina.kernels.attention.quantized import decode_codes
from lamina.kernels.attention.rope_append import append, rotate_and_append
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.quant.encode import Side, append_codes, encode
from tests.kernels.stores import Held, InPages, Packed
from tests.kernels.test_codes import new_tokens, sides
from tests.kernels.test_rope import rope_of

SMALL = Tiling(block=16, warps=1, stages=2)
WINDOWS = [Full(), Sliding(11, keep=2), Chunked(13)]
LENGTHS = [0, 9, 31]
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


def stored(window: Window, T: int, page: int, counts: list[int] | None, heads: int = 2) -> tuple[Held, InPages]:
    torch.manual_seed(page)
    held = Held.random(window, LENGTHS, heads, (16, 32), slots=36, counts=counts, slack=2)
    return held, InPages(held, fields(held), page, T)


def fields(held: Held) -> dict[str, Tensor]:
    return dict(zip("kv", held.fields, strict=False))


def alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_token_attends_over_pages_and_goes_into_its_own(window: Window, page: int) -> None:
    held, paged = stored(window, 1, page, [1, 0, 1])
    q, k, v = new_tokens(held, 1, (2, 2), (16, 32), torch.float32)
    sinks = torch.randn(2)
    how: dict[str, Any] = dict(
        rope=rope_of(held, 1, 4), window=window, scale=0.3, sinks=sinks, shape=SMALL, most_parts=3, least=16
    )
    expected = attend_token(q, k, v, table=held.table(), **how)
    alike(attend_token(q, k, v, table=paged.table(), page=page, **how), expected)
    assert expected.isfinite().all()
    paged.same(fields(held))


@pytest.mark.parametrize(("window", "page"), [(Full(), 8), (Sliding(11, keep=2), 3), (Chunked(13), 16)], ids=str)
def test_several_tokens_are_turned_attend_and_are_taken_in(window: Window, page: int) -> None:
    held, paged = stored(window, 3, page, [3, 2, 3])
    ring = held.layout.ring is not None
    q, k, v = new_tokens(held, 3, (2, 2), (16, 32), torch.float32)
    rope = rope_of(held, 3, 4)
    dense = rotate_and_append(q, k, v, rope, held.table(), write=not ring)
    found = rotate_and_append(q, k, v, rope, paged.table(), write=not ring, page=page)
    for one, other in zip(found, dense, strict=True):
        alike(one, other)
    how: dict[str, Any] = dict(window=window, scale=0.3, sinks=torch.randn(2), shape=SMALL, most_parts=3, least=16)
    expected = decode_attention(*dense, held.table(), **how)
    alike(decode_attention(*dense, paged.table(), page=page, **how), expected)
    assert expected.isfinite().all()
    if ring:
        append(*dense[1:], held.table())
        append(*dense[1:], paged.table(), page)
    paged.same(fields(held))


@pytest.mark.parametrize(
    ("codec", "window", "T", "page"),
    [("int4", Full(), 2, 5), ("fp8", Full(), 1, 16), ("k8v4", Sliding(11, keep=2), 1, 4), ("int5", Chunked(13), 3, 8)],
    ids=str,
)
def test_codes_lie_in_pages_too(codec: str, window: Window, T: int, page: int) -> None:
    torch.manual_seed(T)
    dims, counts = (16, 32), [T, 0, T]
    held = Held.random(window, LENGTHS, 1, dims, slots=36, counts=counts, slack=2)
    packed = Packed(held, codec)
    paged = InPages(held, packed.parts, page, T)
    q, k, v = new_tokens(held, T, (2, 1), dims, torch.float32)
    write = T == 1 or held.layout.ring is None
    how: dict[str, Any] = dict(scale=0.3, sinks=torch.randn(2), most_parts=3, shape=SMALL, least=16)
    keys, values = sides(packed, dims)
    dense = encode(q, k, v, packed.table(), keys, values, write=write)
    found = encode(q, k, v, paged.table(), keys, values, write=write, page=page)
    expected = decode_codes(dense, packed.table(), window, torch.float32, **how)
    alike(decode_codes(found, paged.table(), window, torch.float32, page=page, **how), expected)
    assert expected.isfinite().all()
    if not write:
        append_codes(k, v, packed.table(), keys, values)
        append_codes(k, v, paged.table(), keys, values, page)
    paged.same(packed.parts)


@pytest.mark.parametrize(
    ("codec", "T", "page"), [(None, 1, 32), (None, 3, 5), ("int8", 1, 4), ("int6", 2, 16)], ids=str
)
def test_latents_lie_in_pages_too(codec: str | None, T: int, page: int) -> None:
    torch.manual_seed(T)
    rank, pairs, heads, nope = 32, 4, 2, 6
    width, counts = rank + 2 * pairs, [T, 0, T]
    held = Held.random(Full(), LENGTHS, 1, (width,), slots=36, counts=counts)
    packed = None if codec is None else Packed(held, codec, rotated=False, has_mean=False)
    parts = fields(held) if packed is None else packed.parts
    paged = InPages(held, parts, page, T)
    q = torch.randn(len(LENGTHS), heads, T, nope + 2 * pairs)
    kv, up = torch.randn(len(LENGTHS), T, width), torch.randn(heads, nope, rank)
    rope, results = rope_of(held, T, pairs), []
    for table, slots in ((held.row(parts), 0), (paged.table(), page)):
        q_in, new = into_latent(q, kv, up, torch.ones(rank), 1e-6, rope, table, write=packed is None, page=slots)
        seen: Any = new
        if packed is not None:
            side = Side.of(packed.formats["k"], width)
            seen = encode(new[:, None], new[:, None], None, table, side, write=True, page=slots)
        mixed = decode_latent(q_in, seen, table, rank=rank, scale=0.3, most_splits=3, shape=SMALL, least=16, page=slots)
        results.append((q_in, new, out_of_latent(mixed, up, table)))
    for found, expected in zip(results[1], results[0], strict=True):
        alike(found, expected)
        assert expected.isfinite().all()
    paged.same(parts)
