"""Quantized BitNet checkpoints: transformers' own layers are the truth, run eagerly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitNetForCausalLM
from transformers.integrations.bitnet import replace_with_bitnet_linear
from transformers.utils.quantization_config import BitNetQuantConfig

import lamina
from lamina.errors import InputError
from tests.families.cases import cases
from tests.families.harness import TOLERANCE, random_ids, relative


def packed(weight: Tensor) -> Tensor:
    """Random ternary weights, four to a byte: [out, in] -> [out / 4, in]"""
    codes = torch.randint(0, 3, weight.shape, dtype=torch.uint8)
    return sum(part << 2 * i for i, part in enumerate(codes.chunk(4)))  # type: ignore[return-value]


def save(folder: Path, **settings: Any) -> BitNetForCausalLM:
    """A checkpoint as it is published, and the model that transformers makes of it."""
    torch.manual_seed(0)
    theirs = BitNetForCausalLM(cases("bitnet")["plain"]()).eval()
    tensors = {name: tensor + torch.randn_like(tensor) * 0.05 for name, tensor in theirs.state_dict().items()}
    how = BitNetQuantConfig(modules_to_not_convert=["lm_head"], **settings)
    online = how.quantization_mode == "online"
    for name in [f"{path}.weight" for path, one in theirs.named_modules() if isinstance(one, nn.Linear)]:
        if "proj" in name and not online:
            tensors[name] = packed(tensors[name])
            tensors[f"{name}_scale"] = torch.rand(1) + 0.5
    save_file(tensors, folder / "model.safetensors")
    config = theirs.config.to_dict() | {"quantization_config": how.to_dict(), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    replace_with_bitnet_linear(theirs, ["lm_head"], how)
    if how.linear_class == "autobitlinear" and not online:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.uint8:
                tensors[name] = torch.cat([tensor >> shift & 3 for shift in (0, 2, 4, 6)]).float() - 1
    theirs.load_state_dict(tensors, assign=True)
    return theirs


@pytest.mark.parametrize(
    "settings",
    [
        dict(linear_class="autobitlinear", quantization_mode="offline"),
        dict(linear_class="autobitlinear", quantization_mode="online"),
        dict(linear_class="bitlinear"),
    ],
    ids=["packed", "rounded at load", "packed with divisors"],
)
def test_quantized_weights_and_rounded_inputs_give_the_logits_of_transformers(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs, ids = save(tmp_path, **settings), random_ids(1, 12, 67)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        truth = theirs(ids, use_cache=False).logits
    assert relative(lamina.load(tmp_path, device="cpu")(ids), truth) < TOLERANCE


def test_norms_inside_products_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, linear_class="autobitlinear", use_rms_norm=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["use_rms_norm"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="use_rms_norm=True in the configuration is not supported"):
        lamina.load(tmp_path, device="cpu")
