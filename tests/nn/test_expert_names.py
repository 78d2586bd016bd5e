"""Checkpoint names of experts: each layout fills `Experts` with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lamina.checkpoint import fill, open_source
from lamina.nn import Experts
from lamina.nn.moe.names import (
    expert_names,
    gates_first,
    interleaved_stack_names,
    linear_stack_names,
    swapped_stack_names,
)  # fmt: skip

E, W, N = 3, 4, 2  # experts, width, inner width
GATE, UP, DOWN = torch.randn(E, N, W), torch.randn(E, N, W), torch.randn(E, W, N)
GATE_UP = torch.cat((GATE, UP), 1)


def loaded(folder: Path, tensors: dict[str, Tensor], names: Any, **options: Any) -> Experts:
    folder.joinpath("config.json").write_text("{}")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with torch.device("meta"):
        module = nn.ModuleDict({"experts": Experts(E, options.pop("width", W), N, **options)})
    fill(module, open_source(folder), names, progress=False)
    experts = module["experts"]
    assert isinstance(experts, Experts)
    return experts


def one_by_one(prefix: str, **stacks: Tensor) -> dict[str, Tensor]:
    return {f"{prefix}.{e}.{name}.weight": stack[e] for name, stack in stacks.items() for e in range(E)}


LAYOUTS = {
    "one by one": (
        one_by_one("m.experts", gate_proj=GATE, up_proj=UP, down_proj=DOWN),
        expert_names("experts", "m.experts"),
    ),
    "stacks": ({"m.experts.gate_up_proj": GATE_UP, "m.experts.down_proj": DOWN}, expert_names("experts", "m.experts")),
    "mixtral, either prefix": (
        one_by_one("mlp.experts", w1=GATE, w3=UP, w2=DOWN),
        expert_names("experts", "block_sparse_moe.experts", "mlp.experts", parts=("w1", "w3", "w2")),
    ),
    "granite": ({"m.input_linear.weight": GATE_UP, "m.output_linear.weight": DOWN}, linear_stack_names("experts", "m")),
    "granite, new": (
        {"m.experts.gate_up_proj": GATE_UP, "m.experts.down_proj": DOWN},
        linear_stack_names("experts", "m"),
    ),
    "swapped": ({"m.gate_up_proj": GATE_UP.mT, "m.down_proj": DOWN.mT}, swapped_stack_names("experts", "m")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_experts(layout: str, tmp_path: Path) -> None:
    experts = loaded(tmp_path, *LAYOUTS[layout])
    assert torch.equal(experts.first, GATE_UP) and torch.equal(experts.down, DOWN)


def test_ungated_experts_have_up_and_down(tmp_path: Path) -> None:
    names = expert_names("experts", "m.experts", parts=("wi", "wo"), expert="expert_{e}")
    tensors = one_by_one("m.experts", wi=UP, wo=DOWN)
    tensors = {name.replace("experts.", "experts.expert_"): tensor for name, tensor in tensors.items()}
    experts = loaded(tmp_path, tensors, names, gated=False)
    assert torch.equal(experts.first, UP) and torch.equal(experts.down, DOWN)


def test_rows_of_gate_and_up_that_alternate_are_put_apart(tmp_path: Path) -> None:
    up_bias, down_bias = torch.randn(E, 2 * N), torch.randn(E, 32)
    first, down = torch.randn(E, 2 * N, 32), torch.randn(E, 32, N)
    tensors = {"m.gate_up_proj_bias": up_bias, "m.down_proj_bias": down_bias}
    tensors |= {"m.gate_up_proj": first.mT, "m.down_proj": down.mT}
    experts = loaded(tmp_path, tensors, interleaved_stack_names("experts", "m"), width=32, bias=True)
    assert torch.equal(experts.first, gates_first(first)) and torch.equal(experts.down, down)
    assert experts.first_bias is not None and torch.equal(experts.first_bias, gates_first(up_bias))
    assert torch.equal(experts.first[:, 1], first[:, 2])
