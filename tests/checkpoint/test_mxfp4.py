from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lamina.checkpoint import mxfp4
from lamina.checkpoint.mxfp4 import dequantize_mxfp4


def test_blocks_and_scales_give_the_values_that_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "CHUNK", 7)
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 4, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales)  # [E, in, out]
    assert torch.equal(dequantize_mxfp4(blocks, scales), expected.transpose(1, 2))
    assert dequantize_mxfp4(blocks.to("meta"), scales.to("meta")).shape == (3, 4, 64)
