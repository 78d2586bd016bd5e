"""Formats of packed weights: dequantize against the package gguf and plain arithmetic; products against dense."""

from __future__ import annotations

import gguf
import pytest
import torch

from lamina.errors import CheckpointError, InputError
from lamina.weights import FORMATS, PackedWeight, packed_linear, weight_format, writable
from lamina.weights.fp8 import Fp8, float8_values
from lamina.weights.gguf_blocks import GGUFFormat, mxfp4_blocks
from lamina.weights.int_groups import IntGroups
from lamina.weights.nibbles import halves_of_neighbours, pack_nibbles, unpack_nibbles

GGUF = [name for name, one in FORMATS.items() if isinstance(one, GGUFFormat)]
OUT, WIDTH = 150, 512  # more rows than one block of 128
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}


def random_parts(name: str, out: int = OUT, width: int = WIDTH, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random codes with scales of moderate size."""
    format, noise = FORMATS[name], torch.Generator().manual_seed(seed)
    if not isinstance(format, GGUFFormat):
        return format.pack(torch.randn(out, width, generator=noise))
    blocks = torch.randint(0, 256, (out * width // format.group, format.size), dtype=torch.uint8, generator=noise)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(118, 124, (len(blocks),), generator=noise)
    for at in SCALES.get(name, (0,)) if name != "MXFP4" else ():
        scale = torch.rand(len(blocks), 1, generator=noise).add(0.01).div(64).half()
        blocks[:, at : at + 2] = scale.view(torch.uint8)
    return {"blocks": blocks.view(out, -1)}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_blocks_are_dequantized_to_the_bit_as_gguf_does(name):
    kind, format = gguf.GGMLQuantizationType[name], FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (format.group, format.size)
    parts = random_parts(name)
    theirs = torch.from_numpy(gguf.dequantize(parts["blocks"].numpy(), kind))
    assert torch.equal(format.dequantize(parts, (OUT, WIDTH), torch.float32), theirs) and theirs.isfinite().all()


@pytest.mark.parametrize("shape", [(OUT, WIDTH), (3, 8, 64)], ids=str)
@pytest.mark.parametrize("name", writable())
def test_parts_on_the_meta_device_have_the_shapes_and_types_of_packed_ones(name, shape):
    real, like = (weight_format(name).pack(torch.ones(shape, device=device)) for device in ("cpu", "meta"))
    assert list(real) == list(like) and all(part.is_meta for part in like.values())
    assert all(real[part].shape == like[part].shape and real[part].dtype == like[part].dtype for part in real)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_rows_and_dense_agree(name, dtype):
    weight = PackedWeight(FORMATS[name], random_parts(name), (OUT, WIDTH), dtype)
    dense = weight.dense()
    assert dense.dtype == dtype and weight.nbytes == FORMATS[name].bytes_of(OUT, WIDTH)
    ids = torch.tensor([[0, 149, 3], [3, 128, 127]])
    assert torch.equal(weight.rows(ids), dense[ids])
    index = torch.tensor([0, 511, 512, OUT * WIDTH - 1])
    assert torch.equal(weight.take(index), dense.flatten()[index])
    bias = torch.randn(OUT, dtype=dtype)
    for rows in (1, 3, 70):
        x = torch.randn(rows, WIDTH, dtype=dtype)
        found, wanted = packed_linear(x, weight, bias), torch.nn.functional.linear(x, dense, bias)
        assert (found - wanted).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * wanted.abs().max()


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.0065), ("int4", 0.08), ("fp8", 0.035)])
def test_packing_rounds_to_nearest(name, bound):
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    weight[1] *= 1e-9  # scales below those of float16
    format = weight_format(name)
    again = format.dequantize(format.pack(weight), weight.shape, torch.float32)
    assert again.isfinite().all() and (again[0] == 0).all()
    assert (again[2:] - weight[2:]).norm() <= bound * weight[2:].norm()
    assert (again[2:] - weight[2:]).norm() >= bound / 2 * weight[2:].norm()


def test_the_searched_range_of_int4_is_never_worse_than_the_whole_and_better_in_all(monkeypatch):
    weight, format = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)), IntGroups(4)

    def errors():
        again = format.dequantize(format.pack(weight), weight.shape, torch.float32)
        return (again - weight).square().view(16, 16, 32).sum(-1)

    searched = errors()
    monkeypatch.setattr("lamina.weights.int_groups.TRIED", (1.0,))
    whole = errors()
    assert (searched <= whole * 1.0001).all() and (searched < whole).sum() > 80  # of 256 groups
    assert searched.sum() < 0.97 * whole.sum()


def test_groups_with_zeros_and_an_order_of_columns():
    noise = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (6, 64), dtype=torch.uint8, generator=noise)
    scales, zeros = torch.rand(6, 2, generator=noise), torch.randint(0, 17, (6, 2), dtype=torch.uint8, generator=noise)
    order = torch.randperm(64, generator=noise).int()
    wanted = torch.empty(6, 64)
    for row in range(6):
        for j in range(64):
            wanted[row, order[j]] = scales[row, j // 32] * (int(codes[row, j]) - int(zeros[row, j // 32]))
    format, parts = IntGroups(4), {"codes": pack_nibbles(codes), "scales": scales, "zeros": zeros, "order": order}
    weight = PackedWeight(format, parts, (6, 64))
    assert torch.equal(weight.dense(), wanted) and torch.equal(unpack_nibbles(parts["codes"]), codes)
    x = torch.randn(3, 64)
    assert torch.allclose(packed_linear(x, weight), x @ wanted.T, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns", "scales"), [(0, 0, (1, 1)), (1, 0, (200, 1)), (128, 128, (2, 3))])
def test_float8_with_a_scale_for_a_matrix_a_row_and_a_block(rows, columns, scales):
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(scales)
    format = Fp8(rows, columns)
    format.check({"codes": codes, "scales": scale}, (200, 300), "w")
    weight = PackedWeight(format, {"codes": codes, "scales": scale}, (200, 300))
    wanted = codes.float()
    for i in range(scales[0]):
        for j in range(scales[1]):
            block = (
                slice(i * (rows or 200), (i + 1) * (rows or 200)),
                slice(j * (columns or 300), (j + 1) * (columns or 300)),
            )
            wanted[block] *= scale[i, j]
    assert torch.equal(weight.dense(), wanted)
    order = torch.randperm(200)
    assert torch.equal(weight.select(order).dense(), wanted[order])
    assert torch.equal(weight.select(slice(130, 190)).dense(), wanted[130:190])
    assert torch.equal(weight.rows(order[:5]), wanted[order[:5]])


def test_every_float8_value_is_exact():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes.float().isfinite()
    assert torch.equal(float8_values(codes)[finite], codes.float()[finite]) and finite.sum() == 254


def test_mxfp4_of_gpt_oss_becomes_the_blocks_of_gguf():
    codes = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 130, (3, 5, 2), dtype=torch.uint8)
    values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    table = torch.tensor([*values, *(-one for one in values)])
    wanted = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]  # neighbours share a byte
    wanted = (wanted * 2.0 ** (exponents[..., None].float() - 127)).flatten(-2)
    found = FORMATS["MXFP4"].dequantize({"blocks": mxfp4_blocks(codes, exponents)}, (3, 5, 64), torch.float32)
    assert torch.equal(found, wanted)


def test_neighbours_become_halves_in_pieces_of_any_count():
    codes = torch.randint(0, 256, (7, 3, 2544), dtype=torch.uint8)  # the last piece is smaller than the others
    values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    assert torch.equal(unpack_nibbles(halves_of_neighbours(codes)), values)
    assert torch.equal(halves_of_neighbours(codes.mT.contiguous().mT), pack_nibbles(values))
    assert halves_of_neighbours(codes.to("meta")).shape == codes.shape


def test_errors_name_the_tensor_and_the_type():
    blocks = torch.zeros(4, 36, dtype=torch.uint8)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.x is Q4_0 with rows of 72 values, which groups of 32 do not div"
    ):
        FORMATS["Q4_0"].check({"blocks": blocks}, (4, 72), "blk.0.x")
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.x is Q4_0 of shape \[4, 96\], whose blocks are uint8 \[4, 54\]; fou"
    ):
        FORMATS["Q4_0"].check({"blocks": blocks}, (4, 96), "blk.0.x")
    with pytest.raises(
        CheckpointError, match=r"w is int4, groups of 32 of shape \[4, 64\], whose scales are \[4, 2\]; found"
    ):
        IntGroups(4).check({"codes": blocks[:, :32], "scales": torch.zeros(4, 3)}, (4, 64), "w")
    with pytest.raises(CheckpointError, match="w is int8, groups of 48 with rows of 64 values"):
        IntGroups(8, 48).check({}, (4, 64), "w")
    with pytest.raises(
        CheckpointError, match=r"w is fp8, a scale for 128 rows × 128 columns .* are \[1, 2\]; found \[1, 1\]"
    ):
        codes = torch.zeros(4, 256).to(torch.float8_e4m3fn)
        Fp8(128, 128).check({"codes": codes, "scales": torch.ones(1, 1)}, (4, 256), "w")
    with pytest.raises(InputError, match="there is no weight format 'int5'; the nearest is 'int"):
        weight_format("int5")
    with pytest.raises(InputError, match="weights are read in Q4_K, and written in: fp8, int8, int4"):
        weight_format("Q4_K").pack(torch.zeros(1, 256))
    assert set(writable()) == {"int8", "int4", "fp8"}
