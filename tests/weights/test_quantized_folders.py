"""Folders that other programs quantized: AWQ, GPTQ, compressed-tensors and FP8 are read, and stay packed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.checkpoint import open_source
from lamina.checkpoint.quantized import METHODS
from lamina.checkpoint.quantized.code_order import use_kernel
from lamina.errors import CheckpointError
from lamina.native import library
from lamina.weights import Packed, named_weights, packed_formats, weight_bytes
from tests.families.harness import relative
from tests.weights.layouts import GROUP, LAYOUTS

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    config = LlamaConfig(
        vocab_size=40, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantized(plain, folder, settings, encode):
    """A folder with quantized linear layers, and beside it the values that they stand for."""
    tensors = load_file(plain / "model.safetensors")
    stored, dense = {}, {}
    for i, (name, tensor) in enumerate(tensors.items()):
        if name.endswith("_proj.weight"):
            parts, dense[name] = encode(tensor, i)
            stored |= {name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
        else:
            stored[name] = dense[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    for place, values, more in ((folder / "q", stored, {"quantization_config": settings}), (folder / "d", dense, {})):
        place.mkdir()
        save_file(values, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(config | more))
    return folder / "q", folder / "d"


def tokens(model):
    return model.generate(IDS.tolist(), max_new_tokens=64, do_sample=False, eos_token_id=None).tokens


@pytest.fixture
def by_pytorch():
    """Codes are put into order by PyTorch alone."""
    before = use_kernel(None)
    yield
    use_kernel(before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_that_the_layout_stands_for(layout, plain, tmp_path):
    library.library()  # or PyTorch would put codes into order
    folder, dense = quantized(plain, tmp_path, *LAYOUTS[layout])
    packed, wanted = lamina.load(folder, device="cpu", activations="float32"), lamina.load(dense, device="cpu")
    matrices = {name: one for name, one in named_weights(packed) if isinstance(one, Packed)}
    assert len(matrices) == 8 and weight_bytes(packed) < weight_bytes(wanted) / 2
    for name, one in matrices.items():
        assert torch.allclose(one.dense(), wanted.get_parameter(name), rtol=1e-6, atol=1e-7), name
    with torch.no_grad():
        assert relative(packed(IDS), wanted(IDS)) < 1e-5
        assert relative(lamina.load(folder, device="cpu", weights="plain")(IDS), wanted(IDS)) < 1e-5
    assert tokens(packed) == tokens(wanted)
    found = lamina.inspect(folder)
    assert found.problem is None and not found.unread
    if layout != "gptq, act-order":  # where joined matrices have orders of columns of their own, as values say
        assert found.weight_bytes == weight_bytes(packed) and found.packed == packed_formats(packed)


INTEGERS = [name for name in LAYOUTS if "fp8" not in name and name not in ("float-quantized", "fbgemm")]


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operation made."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.nbytes = max([self.nbytes, *(one.nbytes for one in tree_leaves(made) if isinstance(one, torch.Tensor))])
        return made


@pytest.mark.parametrize("layout", INTEGERS)
def test_codes_of_many_blocks_are_put_into_order_in_bounded_memory(layout, by_pytorch):
    settings, encode = LAYOUTS[layout]
    encoded, wanted = encode(torch.zeros(2080, 3 * GROUP), 3)  # several blocks of outputs
    tensors = {f"w{ending}": tensor for ending, tensor in encoded.items()}
    whole_bytes = layout == "int-quantized"
    found = [(kind, names) for kind in METHODS[settings["quant_method"]] for names in kind.find(set(tensors)).values()]
    (kind, names), *_ = [one for one in found if (tensors[one[1]["codes"]].dtype == torch.int8) == whole_bytes]
    with Largest() as largest:
        weight = kind.pack({part: tensors[name] for part, name in names.items()}, settings, "w")
    assert torch.allclose(weight.dense(), wanted, rtol=1e-6, atol=1e-7)
    assert largest.nbytes <= max(weight.codes.nbytes, 1 << 17)


def test_loading_imports_no_compiler(plain, tmp_path):
    """PyTorch computes shapes of some integer operations in Python, for which it imports sympy: seconds."""
    places = []
    for i, layout in enumerate(LAYOUTS):
        (tmp_path / str(i)).mkdir()
        places.append(str(quantized(plain, tmp_path / str(i), *LAYOUTS[layout])[0]))
    code = (
        "import sys, lamina\nfor path in sys.argv[1:]:\n    lamina.load(path, device='cpu')\n"
        "print(*({'sympy', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stdout.strip(), done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("layout", ["awq", "gptq", "pack-quantized", "int-quantized", "fp8, blocks"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_that_are_not_finite_are_refused(layout, value, plain, tmp_path):
    folder, _ = quantized(plain, tmp_path, *LAYOUTS[layout])
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "1.mlp.up_proj" in name and "scale" in name and "input" not in name)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is (int|fp8).*: 1 of its \d+ scales are NaN"
    ):
        lamina.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("layout", "lacking", "text"),
    [
        ("awq", "scales", r"\.weight is quantized with awq \(.*up_proj\.qweight, int32\) and lacks .*up_proj\.scales"),
        ("gptq", "qzeros", r"\.weight is quantized with gptq .* lacks .*up_proj\.qzeros"),
        ("pack-quantized", "weight_scale", r"quantized with compressed-tensors .*int32\) and lacks .*\.weight_scale"),
        ("int-quantized", "weight_scale", r"quantized with compressed-tensors .*int8\) and lacks .*\.weight_scale"),
        ("fp8, blocks", "weight_scale_inv", r"fp8 .*float8_e4m3fn\) and lacks .*weight_scale_inv or .*weight_scale"),
    ],
)
def test_codes_without_scales_are_refused_by_name(layout, lacking, text, plain, tmp_path):
    folder, _ = quantized(plain, tmp_path, *LAYOUTS[layout])
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{lacking}"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.up_proj{text}|mlp\.up_proj.*{text}"):
        lamina.load(folder, device="cpu")


def test_parts_of_wrong_types_and_shapes_are_refused_by_name(plain, tmp_path):
    name = "model.layers.0.mlp.up_proj"

    def load(layout, part, value):
        folder = tmp_path / f"{layout}-{part}"
        folder.mkdir()
        quantized(plain, folder, *LAYOUTS[layout])
        tensors = load_file(folder / "q" / "model.safetensors")
        save_file(tensors | {f"{name}.{part}": value}, folder / "q" / "model.safetensors")
        lamina.load(folder / "q", device="cpu")

    with pytest.raises(CheckpointError, match=rf"{name}\.weight has codes in torch\.float32; they are read in int32"):
        load("gptq", "qweight", torch.zeros(8, 160))
    with pytest.raises(CheckpointError, match=rf"{name}\.weight has zeros in torch\.float32"):
        load("awq", "qzeros", torch.ones(2, 20))
    with pytest.raises(CheckpointError, match=rf"{name}\.weight has scales in torch\.int32"):
        load("awq", "scales", torch.ones(2, 160, dtype=torch.int32))
    with pytest.raises(CheckpointError, match=rf"{name}\.weight is int4 \[160, 64\] with scales \[160, 0\]"):
        load("gptq", "scales", torch.ones(0, 160))
    with pytest.raises(
        CheckpointError, match=rf"{name}\.weight cannot be read as compressed-tensors: .*weight_shape \[3\]"
    ):
        load("pack-quantized", "weight_shape", torch.tensor([160, 64, 1]))


def test_neighbours_may_differ_in_their_parts(plain, tmp_path):
    """q, k and v are joined: zeros for some alone, and scales of several dtypes, do not become one tensor."""
    folder, dense = quantized(plain, tmp_path, *LAYOUTS["pack-quantized"])
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("q_proj.weight_scale")]:
        out, groups = tensors[name].shape
        tensors[name] = tensors[name].float()
        tensors[name.replace("scale", "zero_point")] = torch.full(
            (out // 8, groups), -2004318072, dtype=torch.int32
        )  # 8
    save_file(tensors, folder / "model.safetensors")
    packed, wanted = lamina.load(folder, device="cpu", activations="float32"), lamina.load(dense, device="cpu")
    assert len(packed.blocks[0].attention.qkv.weight.segments) == 2
    with torch.no_grad():
        assert relative(packed(IDS), wanted(IDS)) < 1e-5


def test_what_cannot_be_read_is_named(plain, tmp_path):
    settings, encode = LAYOUTS["gptq"]
    folder, _ = quantized(plain, tmp_path, settings, encode)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj"

    def load(changes=None, **more):
        save_file(tensors | (changes or {}), file)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings | more}))
        return lamina.load(folder, device="cpu")

    with pytest.raises(CheckpointError, match=r"\w+_proj\.weight has 3 bits \(gptq\); 4 and 8 bits are read"):
        load(bits=3)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is int4 \[160, 64\] with scales \[160, 3\]"):
        load({f"{name}.scales": torch.ones(3, 160), f"{name}.qzeros": torch.ones(3, 20, dtype=torch.int32)})
    with pytest.raises(
        CheckpointError, match=r"up_proj\.weight: its g_idx does not divide 64 inputs into 2 groups of eq"
    ):
        load({f"{name}.g_idx": torch.zeros(64, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: its g_idx .* it has values from 0 to 9"):
        load({f"{name}.g_idx": torch.cat([torch.zeros(63), torch.tensor([9.0])]).int()})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: its g_idx has the shape \[32\]; it has 64 inputs"):
        load({f"{name}.g_idx": torch.arange(32).int() // 16})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is int4.* whose zeros are \[160, 2\]; found \[80, 2\]"):
        load({f"{name}.qzeros": torch.ones(2, 10, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight \[8, 8\], expected|expected \[320, 64\]"):
        load({f"{name}.qweight": torch.zeros(4, 160, dtype=torch.int32), f"{name}.g_idx": torch.arange(32).int() // 16})
    with pytest.raises(CheckpointError, match="with 'awq', and has no tensors of that"):
        save_file({"x.weight": torch.ones(2)}, file)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
        open_source(folder)
    with pytest.raises(CheckpointError, match="compressed-tensors in the format 'marlin-24'; read are pack-quantized"):
        more = {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}
        (folder / "config.json").write_text(json.dumps(config | more))
        open_source(folder)
