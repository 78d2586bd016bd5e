"""Codes of joined and stacked weights are written once, into memory where they follow each other."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lamina
from lamina.native import library
from lamina.weights import JoinedWeight, PackedWeight, named_weights
from lamina.weights.code_room import CodeRoom
from lamina.weights.format import cat
from tests.weights.layouts import LAYOUTS

SIZES = dict(vocab_size=40, hidden_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)

CODES = (torch.uint8, torch.int32)


def quantized(model, folder, layout, other=None):
    """A folder with the linear layers of a model in a layout; k in the layout `other`, if given."""
    model.save_pretrained(folder)
    settings, encode = LAYOUTS[layout]
    stored = {}
    for i, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        how = LAYOUTS[other][1] if other is not None and "k_proj" in name else encode
        parts = how(tensor, i)[0] if name.endswith("_proj.weight") else {".weight": tensor}
        stored |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=160))


class Made(TorchDispatchMode):
    """uint8 and int32 tensors of at least this size that operations made; not those that safetensors reads."""

    def __init__(self, least):
        super().__init__()
        self.least, self.found = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::set_", "aten::detach")):
            ints = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor) and one.dtype in CODES]
            large = [one for one in ints if one.device.type == "cpu" and one.nbytes >= self.least]
            self.found += [f"{func.name()} {list(one.shape)}" for one in large]
        return made


@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq, 8 bits", "pack-quantized", "pack-quantized, 8 bits"])
def test_no_operation_of_pytorch_touches_codes(layout, tmp_path):
    library.library()
    folder = quantized(llama(), tmp_path, layout)
    with Made(48 * 96 // 2) as made:  # codes of k, the smallest matrix
        model = lamina.load(folder, device="cpu")
    assert not made.found
    for name, one in named_weights(model):
        if isinstance(one, PackedWeight):
            assert one.codes.untyped_storage().nbytes() == one.codes.nbytes, name
    assert sum(isinstance(one, PackedWeight) for _, one in named_weights(model)) == 4


@pytest.mark.parametrize("layout", ["awq", "gptq, act-order", "pack-quantized, zeros"])
def test_experts_are_stacked_in_place(layout, tmp_path):
    library.library()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, head_dim=24, moe_intermediate_size=64, intermediate_size=96, num_experts=4, num_experts_per_tok=2
    )
    folder = quantized(Qwen3MoeForCausalLM(config), tmp_path, layout)
    with Made(4 * 64 * 96 // 2) as made:  # codes of a stack
        model = lamina.load(folder, device="cpu")
    stacks = {name: one for name, one in named_weights(model) if isinstance(one, PackedWeight) and one.ndim == 3}
    assert stacks and not made.found
    dense = lamina.load(folder, device="cpu", weights="plain")
    for name, one in stacks.items():
        assert torch.equal(one.dense(), dense.get_parameter(name)), name


def test_pieces_of_different_bits_keep_no_memory_that_is_not_theirs(tmp_path):
    library.library()
    model = lamina.load(quantized(llama(), tmp_path, "pack-quantized", "pack-quantized, 8 bits"), device="cpu")
    joined = model.blocks[0].attention.qkv.weight
    assert isinstance(joined, JoinedWeight) and [str(one.format)[:4] for one in joined.segments] == [
        "int4",
        "int8",
        "int4",
    ]
    for one in joined.segments:
        assert one.codes.untyped_storage().nbytes() == one.codes.nbytes
    dense = lamina.load(tmp_path, device="cpu", weights="plain")
    assert torch.equal(joined.dense(), dense.blocks[0].attention.qkv.weight)


def test_rows_that_follow_each_other_are_joined_without_a_copy():
    room = CodeRoom(7)
    first, second = room.take(3, 4), room.take(4, 4)
    first.fill_(1), second.fill_(2)
    joined = cat([first, second])
    assert joined.data_ptr() == first.data_ptr() and joined.shape == (7, 4) and joined.sum() == 3 * 4 + 2 * 4 * 4
    apart = cat([second, first])
    assert apart.data_ptr() != second.data_ptr() and apart[0].tolist() == [2] * 4
    assert room.take(9, 4).untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
