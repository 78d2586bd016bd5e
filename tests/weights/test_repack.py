"""GGUF blocks that are taken apart for a GPU have the values of the file."""

from __future__ import annotations

import pytest
import torch

from lamina.kernels.packed.serve import matrix_of
from lamina.weights import PackedWeight, weight_format
from lamina.weights.repack import WAYS, repack


def random_blocks(name: str, rows: int, width: int) -> PackedWeight:
    """Any bytes, but with small scales: float16 values of random bits would not be finite."""
    form = weight_format(name)
    blocks = torch.randint(0, 256, (rows, form.bytes_of(1, width)), dtype=torch.uint8)
    each = blocks.unflatten(-1, (-1, form.size))  # type: ignore[attr-defined]
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2),
              "Q5_1": (0, 2)}.get(name, (0,))  # fmt: skip
    for at in places if name != "MXFP4" else ():
        scales = (torch.rand(each.shape[:2]) * 0.1 + 0.01).half()
        each[..., at : at + 2] = scales[..., None].view(torch.uint8)
    if name == "MXFP4":
        each[..., 0] = torch.randint(110, 130, each.shape[:2], dtype=torch.uint8)
    return PackedWeight(form, {"blocks": blocks}, (rows, width))


@pytest.mark.parametrize("name", [*WAYS, "MXFP4"])
def test_blocks_taken_apart_have_the_values_of_the_file(name: str) -> None:
    torch.manual_seed(0)
    weight = random_blocks(name, 3, 512)
    before = weight.dense(torch.float32)
    repack(weight)
    after = weight.dense(torch.float32)
    assert torch.allclose(after, before, rtol=2**-9, atol=2**-10 * float(before.abs().max()))
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"):
        assert torch.equal(after, before)
    kernel = matrix_of(weight)
    assert torch.equal(kernel.dense(torch.float32), after)
