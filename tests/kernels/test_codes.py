"""New tokens are encoded in a kernel as the formats do it, and queries are made ready for codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.attention import Full, Sliding, Window
from lamina.cache.codec.codec import Codec
from lamina.cache.codec.formats import hadamard
from lamina.kernels.attention.rope_append import rotate_and_append
from lamina.kernels.quant.encode import Side, encode
from tests.kernels.stores import Held, Packed
from tests.kernels.test_rope import norm_of, rope_of

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")


def sides(packed: Packed, dims: tuple[int, int]) -> tuple[Side, Side]:
    return Side.of(packed.formats.get("k"), dims[0]), Side.of(packed.formats.get("v"), dims[1])


def new_tokens(
    held: Held, T: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k and v of a pass as a model has them: heads behind tokens, NaN where there is padding."""
    B, hidden = len(held.lengths), ~held.real(T)[:, :, None, None]
    widths = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    made = (torch.randn(B, T, *width).masked_fill(hidden, float("nan")).to(dtype) for width in widths)
    return [x.transpose(1, 2) for x in made]


@pytest.mark.parametrize("codec", ["int8", "int6", "int5", "int4", "fp8", "k8v4"])
@pytest.mark.parametrize(("dims", "window"), [((64, 42), Full()), ((16, 7), Sliding(6, keep=2))], ids=str)
def test_the_kernel_writes_what_the_formats_write(codec: str, dims: tuple[int, int], window: Window) -> None:
    torch.manual_seed(1)
    held = Held.random(window, [1, 9, 5], 1, dims, slots=12, counts=[1, 1, 0])
    packed = Packed(held, codec)
    q, k, v = new_tokens(held, 1, (1, 1), dims, torch.float32)
    expected = {name: part.clone() for name, part in packed.parts.items()}
    for name, x in (("k", k), ("v", v)):
        for part, numbers in packed.formats[name].encode(x.nan_to_num(0)).items():
            column = name if part == "codes" else f"{name}.{part}"
            for row in range(2):
                slot = int(held.layout.slots(held.lengths[row]))
                expected[column][row, :, slot] = numbers[row, :, 0]
    encode(q, k, v, packed.table(), *sides(packed, dims), write=True)
    for column, part in packed.parts.items():
        same = (part == expected[column]) | (part.isnan() & expected[column].isnan())
        assert same.float().mean() > 0.99, column  # a sum in another order may round a number to its neighbour
    for name in packed.formats:
        form = packed.formats[name]
        columns = {part: name if part == "codes" else f"{name}.{part}" for part in form.parts}
        seen, kept = (
            form.decode({part: stored[column] for part, column in columns.items()}).nan_to_num(0)
            for stored in (packed.parts, expected)
        )
        torch.testing.assert_close(seen, kept, rtol=0, atol=0.3 if codec == "int4" else 0.15)


def test_without_writing_the_parts_are_the_passs_own_and_the_store_stays() -> None:
    torch.manual_seed(0)
    dims = (32, 20)
    held = Held.random(Sliding(6), [7, 2], 2, dims, slots=12, counts=[3, 2])
    packed = Packed(held, "k8v4")
    before = {name: part.clone() for name, part in packed.parts.items()}
    q, k, v = new_tokens(held, 3, (2, 2), dims, torch.float32)
    coded = encode(q, k, v, packed.table(), *sides(packed, dims), write=False)
    for name, part in packed.parts.items():
        assert torch.equal(part.nan_to_num(9), before[name].nan_to_num(9))
    found = packed.formats["v"].decode({"codes": coded.v.codes, "scales": coded.v.scales})
    real = held.real(3)[:, None, :, None]
    torch.testing.assert_close(torch.where(real, found, 0), torch.where(real, packed.through("v", v), 0))


@pytest.mark.parametrize(("codec", "dim", "pairs"), [("int8", 64, 32), ("int4", 42, 8), ("fp8", 32, None)])
@pytest.mark.parametrize(
    ("norms_last", "dtype"), [(False, torch.float32), (True, torch.float32), (None, torch.bfloat16)]
)
@torch.no_grad()
def test_heads_that_are_not_yet_normed_and_rotated_are_so_first(
    codec: str, dim: int, pairs: int | None, norms_last: bool | None, dtype: torch.dtype
) -> None:
    T, dims = 2, (dim, 32)
    held = Held.random(Full(), [0, 3], 2, dims, slots=12, counts=[2, 1], dtype=dtype)
    q, k, v = new_tokens(held, T, (4, 2), dims, dtype)
    before: dict[str, Any] = {
        "rope": None if pairs is None else rope_of(held, T, pairs),
        "factor": torch.rand(2, T) + 0.5,
    }
    if norms_last is not None:
        norms = norm_of(dim, True, True).to(dtype), norm_of(dim, False, True).to(dtype)
        before |= {"norms": norms, "norms_last": norms_last, "neighbours": True}
    found = []
    for at_once in (True, False):
        torch.manual_seed(0)
        packed = Packed(held, codec)
        if at_once:
            coded = encode(q, k, v, packed.table(), *sides(packed, dims), write=True, **before)
        else:
            ready = rotate_and_append(q, k, v, table=packed.table(), write=False, **before)
            coded = encode(*ready, packed.table(), *sides(packed, dims), write=True)
        found.append({"q": coded.q, "marks": coded.query_terms, **packed.parts})
    for name, part in found[0].items():
        torch.testing.assert_close(part, found[1][name], equal_nan=True, msg=name)


@pytest.mark.parametrize("codec", [Codec(8, "plain"), Codec("plain", 4)], ids=str)
def test_a_side_that_is_plain_is_written_as_it_comes(codec: Codec) -> None:
    torch.manual_seed(0)
    dims = (32, 40)
    held = Held.random(Full(), [3, 0], 2, dims, slots=8)
    packed = Packed(held, codec)
    q, k, v = new_tokens(held, 1, (4, 2), dims, torch.float32)
    encode(q, k, v, packed.table(), *sides(packed, dims), write=True)
    name, x = ("v", v) if codec.values == "plain" else ("k", k)
    for row, slot in enumerate([3, 0]):
        assert torch.equal(packed.parts[name][row, :, slot], x[row, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_are_turned_and_their_marks_say_what_was_taken_off(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    dims = (72, 32)
    held = Held.random(Full(), [3, 1], 2, dims, slots=8, dtype=dtype)
    packed = Packed(held, "int8")
    q, k, v = new_tokens(held, 2, (4, 2), dims, dtype)
    coded = encode(1000 * q, k, v, packed.table(), *sides(packed, dims), write=True)
    x = (1000 * q).float()
    whole = x[..., :64].unflatten(-1, (2, 32)) @ hadamard(torch.float32, x.device)
    turned = torch.cat([whole.flatten(-2), x[..., 64:]], dim=-1)
    marks = coded.query_terms.transpose(1, 2)  # [B, Hq, T, 2 + groups]
    largest = turned.abs().amax(-1) if dtype == torch.bfloat16 else torch.ones_like(turned[..., 0])
    tolerance = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-2}
    torch.testing.assert_close(coded.q.float() * marks[..., :1], turned, rtol=2e-3, atol=2.0)
    torch.testing.assert_close(marks[..., 0], largest, **tolerance)
    mean = packed.formats["k"].key_mean
    assert mean is not None
    product = (x.unflatten(1, (2, 2)) * mean[:, None].float()).sum(-1).flatten(1, 2)
    torch.testing.assert_close(marks[..., 1], product, rtol=1e-3, atol=1e-1)
    sums = torch.stack([coded.q[..., a:b].float().sum(-1) for a, b in ((0, 32), (32, 64), (64, 72))], dim=-1)
    torch.testing.assert_close(marks[..., 2:], sums, rtol=1e-3, atol=1e-2)
