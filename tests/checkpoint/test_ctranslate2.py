"""CTranslate2's model.bin: a file written from random weights gives them back; unreadable files are named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lamina
from lamina.checkpoint import open_source
from lamina.errors import CheckpointError
from tests.families.test_whisper import pair

NUMBERS = {"encoder/num_heads": 4, "decoder/num_heads": 2, "decoder/activation": 3, "decoder/pre_norm": 1}
SPECIAL = dict(
    endoftext=90, startoftranscript=91, en=92, de=93, fr=94, translate=95, transcribe=96, startofprev=98, nospeech=99,
    notimestamps=100,
)  # fmt: skip
DTYPES = {torch.int8: 1, torch.int16: 2, torch.float32: 0, torch.float16: 4}


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def packed(variables: dict[str, Tensor], version: int = 6, spec: str = "WhisperSpec") -> bytes:
    out = [struct.pack("<I", version), text(spec), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        shape = struct.pack(f"<B{value.dim()}I", value.dim(), *value.shape)
        out += [text(name), shape, struct.pack("<BI", DTYPES[value.dtype], value.nbytes), value.numpy().tobytes()]
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    return b"".join([*out, struct.pack("<I", 1), alias])


def variables_of(theirs: Any) -> dict[str, Tensor]:
    """The weights of a model of transformers as CTranslate2 names and joins them."""
    found: dict[str, Tensor] = {name: torch.tensor(value, dtype=torch.int16) for name, value in NUMBERS.items()}

    def linear(name: str, *modules: Any) -> None:
        found[f"{name}/weight"] = torch.cat([one.weight for one in modules]).detach()
        none = torch.zeros(len(modules[0].weight))
        found[f"{name}/bias"] = torch.cat([none if one.bias is None else one.bias for one in modules]).detach()

    def norm(name: str, module: Any) -> None:
        found[f"{name}/layer_norm/gamma"], found[f"{name}/layer_norm/beta"] = module.weight.data, module.bias.data

    for side in ("encoder", "decoder"):
        stack = getattr(theirs.model, side)
        norm(side, stack.layer_norm)
        found[f"{side}/position_encodings/encodings"] = stack.embed_positions.weight.data
        for i, layer in enumerate(stack.layers):
            at, own = f"{side}/layer_{i}", layer.self_attn
            norm(f"{at}/self_attention", layer.self_attn_layer_norm)
            linear(f"{at}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            linear(f"{at}/self_attention/linear_1", own.out_proj)
            norm(f"{at}/ffn", layer.final_layer_norm)
            linear(f"{at}/ffn/linear_0", layer.fc1)
            linear(f"{at}/ffn/linear_1", layer.fc2)
            if side == "decoder":
                cross = layer.encoder_attn
                norm(f"{at}/attention", layer.encoder_attn_layer_norm)
                linear(f"{at}/attention/linear_0", cross.q_proj)
                linear(f"{at}/attention/linear_1", cross.k_proj, cross.v_proj)
                linear(f"{at}/attention/linear_2", cross.out_proj)
    found["decoder/embeddings/weight"] = theirs.model.decoder.embed_tokens.weight.data
    for name in ("conv1", "conv2"):
        module = getattr(theirs.model.encoder, name)
        found[f"encoder/{name}/weight"], found[f"encoder/{name}/bias"] = module.weight.data, module.bias.data
    return found


def folder(path: Path, content: bytes) -> Path:
    (path / "model.bin").write_bytes(content)
    (path / "config.json").write_text(json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3, 90]}))
    added = [dict(id=id, content=f"<|{name}|>", special=True) for name, id in SPECIAL.items()]
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    vocabulary = {"a": 0} | {one["content"]: one["id"] for one in added}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [one | plain for one in added], "model": model})
    )
    return path


def test_the_weights_and_the_configuration_are_those_of_the_model(tmp_path: Path) -> None:
    theirs, ours = pair("english")
    found = lamina.load(folder(tmp_path, packed(variables_of(theirs))), device="cpu")
    for (name, one), other in zip(found.state_dict().items(), ours.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    same = ("d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size")
    for name in (*same, "num_mel_bins", "max_source_positions", "max_target_positions", "activation_function"):
        assert getattr(found.config, name) == getattr(ours.config, name), name
    assert found.start_ids == (91,) and found.eos_ids == (90,) and found.tokenizer is not None
    said = found.generation_defaults
    assert said["suppress_tokens"] == [1, 2] and said["begin_suppress_tokens"] == [3, 90]
    assert said["no_timestamps_token_id"] == 100 and said["prev_sot_token_id"] == 98 and not said["is_multilingual"]


def test_values_are_read_in_the_dtype_of_the_file(tmp_path: Path) -> None:
    theirs, _ = pair("english")
    half = {name: value.half() if value.is_floating_point() else value for name, value in variables_of(theirs).items()}
    source = open_source(folder(tmp_path, packed(half)))
    assert source.config["dtype"] == "float16"
    value = source.read("model.decoder.layers.1.encoder_attn.v_proj.weight")
    assert torch.equal(value, theirs.model.decoder.layers[1].encoder_attn.v_proj.weight.half())
    assert source.shape("model.decoder.layers.1.encoder_attn.v_proj.weight") == (32, 32)
    assert "model.decoder.layers.1.encoder_attn.k_proj.bias" not in source.names
    with pytest.raises(CheckpointError, match=r"has no tensor proj_in"):
        source.read("proj_in")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: packed(found)[:-5000], "is cut short or damaged"),
        (lambda found: packed(found, version=7), "has version 7 of CTranslate2's format; known: 4, 5, 6"),
        (lambda found: packed(found, spec="TransformerSpec"), "holds a TransformerSpec"),
        (
            lambda found: packed(found | {"encoder/layer_0/ffn/linear_0/weight_scale": torch.ones(2)}),
            r"holds quantized weights \(encoder/layer_0/ffn/linear_0/weight_scale\)",
        ),
        (lambda found: packed(found | {"encoder/gate/weight": torch.ones(2)}), "has encoder/gate/weight, which no"),
        (
            lambda found: packed(found | {"decoder/scale_embeddings": torch.tensor(1, dtype=torch.int8)}),
            "has decoder/scale_embeddings=1",
        ),
        (lambda found: packed(found | {"decoder/activation": torch.tensor(9, dtype=torch.int8)}), "has activation 9"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        open_source(folder(tmp_path, change(variables_of(pair("english")[0]))))


def test_files_beside_model_bin_are_needed(tmp_path: Path) -> None:
    path = folder(tmp_path, packed(variables_of(pair("english")[0])))
    (path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(CheckpointError, match=r"tokenizer.json has no <\|endoftext\|>, <\|startoftranscript\|>"):
        open_source(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json, which says the special ids"):
        open_source(path)


def test_a_pickle_that_is_called_model_bin_is_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        open_source(tmp_path)
