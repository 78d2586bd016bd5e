"""A Whisper model in CTranslate2's format: model.bin beside config.json, tokenizer.json and a vocabulary, presented as
the Hugging Face checkpoint it was made from.

model.bin, little-endian; a text is its size in 2 bytes, then its bytes and a zero:

    u32 version, text name of the specification, u32 revision
    u32 n, then n variables: text name, u8 rank, u32 per axis, u8 dtype, u32 bytes, values
    u32 n, then n aliases: text alias, text name of the variable

CTranslate2 joins q, k and v of self-attention (`linear_0`), and k and v of cross-attention (`linear_1`), along axis 0.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lamina.checkpoint.folder import read_json
from lamina.checkpoint.source import Checkpoint, listing
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

VERSIONS = (4, 5, 6)
DTYPES = {
    0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16,
}  # fmt: skip
ACTIVATIONS = {0: "relu", 1: "gelu_new", 2: "silu", 3: "gelu", 4: "quick_gelu"}
FIRST_SECOND = 50  # the largest first timestamp, 1 s; CTranslate2 has it in its program, not in its files
MULTILINGUAL = 51865  # vocabulary size from which published models are multilingual

LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""Modules of a layer: their names here -> those of Hugging Face, several if they are joined here."""
STACK = {
    "conv1": "conv1",
    "conv2": "conv2",
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
    "layer_norm": "layer_norm",
}
LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}


class Variable(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int  # in the file


class Slice(NamedTuple):
    """Part `part` of `parts` along axis 0 of a variable."""

    name: str
    part: int = 0
    parts: int = 1


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds such a model: its model.bin begins with a version and the name of a specification."""
    file = folder / "model.bin"
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        head = opened.read(64)
    return len(head) > 8 and struct.unpack("<I", head[:4])[0] <= 64 and b"Spec\0" in head


class CTranslate2Checkpoint(Checkpoint):
    """model.bin and the files beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "model.bin"
        with self.file.open("rb") as opened:
            self.bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self.variables = self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(f"{self.file} ({len(self.bytes)} bytes) is cut short or damaged") from error
        if quantized := [name for name in self.variables if name.endswith(("weight_scale", "weight_zero"))]:
            raise CheckpointError(
                f"{path} holds quantized weights ({listing(quantized)}); convert with float16 instead"
            )
        self._slices = self._hugging_face_names()
        said = read_json(path / "config.json") if (path / "config.json").is_file() else {}
        self.generation_config = self._generation_config(said)
        self.config = self._config()

    @property
    def names(self) -> Set[str]:
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._slice(name)
        rows, *rest = self.variables[piece.name].shape
        return (rows // piece.parts, *rest)

    def read(self, name: str) -> torch.Tensor:
        piece = self._slice(name)
        return self._values(piece.name).chunk(piece.parts)[piece.part]

    def tokenizer(self) -> Tokenizer | None:
        from lamina.checkpoint.tokenizer import folder_tokenizer  # tokenizers is slow to import

        return folder_tokenizer(self.path, self.eos_ids)

    def _slice(self, name: str) -> Slice:
        if name not in self._slices:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._slices[name]

    def _values(self, name: str) -> torch.Tensor:
        shape, dtype, start = self.variables[name]
        count = torch.Size(shape).numel()
        return torch.frombuffer(memoryview(self.bytes), dtype=dtype, count=count, offset=start).view(shape)

    def _number(self, name: str, default: int | None = None) -> int:
        if name in self.variables:
            return int(self._values(name))
        if default is None:
            raise CheckpointError(f"{self.file} has no {name}")
        return default

    # -- the file ------------------------------------------------------------------------------------------------------

    def _read_header(self) -> dict[str, Variable]:
        at = 0

        def number(kind: str) -> int:
            nonlocal at
            value = struct.unpack_from(f"<{kind}", self.bytes, at)[0]
            at += struct.calcsize(f"<{kind}")
            return value

        def text() -> str:
            nonlocal at
            size = number("H")
            at += size
            return self.bytes[at - size : at].rstrip(b"\0").decode()

        if (version := number("I")) not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise CheckpointError(f"{self.file} has version {version} of CTranslate2's format; known: {known}")
        if (spec := text()) != "WhisperSpec":
            raise CheckpointError(f"{self.file} holds a {spec}; of CTranslate2's models, WhisperSpec is read")
        number("I")
        found: dict[str, Variable] = {}
        for _ in range(number("I")):
            name = text()
            shape = tuple(number("I") for _ in range(number("B")))
            dtype, size = DTYPES[number("B")], number("I")
            if size != torch.Size(shape).numel() * dtype.itemsize or at + size > len(self.bytes):
                raise IndexError
            found[name] = Variable(shape, dtype, at)
            at += size
        for _ in range(number("I")):
            alias, name = text(), text()
            found[alias] = found[name]
        return found

    def _hugging_face_names(self) -> dict[str, Slice]:
        """Tensors by the names that transformers gives them."""
        names: dict[str, Slice] = {}
        for name in self.variables:
            parts = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
            if parts is None or parts[4] not in LEAVES:
                continue  # a number of the configuration
            side, layer, module, leaf = parts[1], parts[2], parts[3], LEAVES[parts[4]]
            if module == "projection":
                names[f"proj_out.{leaf}"] = Slice(name)
                continue
            theirs = LAYER.get(module) if layer is not None else (STACK[module],) if module in STACK else None
            if theirs is None:
                raise CheckpointError(f"{self.file} has {name}, which no Whisper model has")
            where = f"model.{side}." + ("" if layer is None else f"layers.{layer}.")
            for index, one in enumerate(theirs):
                if not (one.endswith("k_proj") and leaf == "bias"):  # zeros here, absent there
                    names[f"{where}{one}.{leaf}"] = Slice(name, index, len(theirs))
        return names

    # -- configurations ------------------------------------------------------------------------------------------------

    def _config(self) -> dict[str, Any]:
        """config.json as Hugging Face has it, from the shapes."""

        def layers(side: str) -> int:
            return len(
                {name.split("/")[1] for name in self.variables if name.startswith(f"{side}/layer_")} - {"layer_norm"}
            )

        for name, expected in {"decoder/scale_embeddings": 0, "decoder/alibi": 0, "decoder/pre_norm": 1}.items():
            if (value := self._number(name, expected)) != expected:
                raise CheckpointError(f"{self.file} has {name}={value}, which no Whisper model has")
        if (act := self._number("decoder/activation", 3)) not in ACTIVATIONS:
            raise CheckpointError(f"{self.file} has activation {act}, which is not known")
        vocab, width = self.shape("model.decoder.embed_tokens.weight")
        made = {
            f"{side}_{field}": value
            for side in ("encoder", "decoder")
            for field, value in {
                "layers": layers(side),
                "attention_heads": self._number(f"{side}/num_heads"),
                "ffn_dim": self.shape(f"model.{side}.layers.0.fc1.weight")[0],
            }.items()
        }
        ids = ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id")
        return {
            "model_type": "whisper",
            "vocab_size": vocab,
            "d_model": width,
            "num_mel_bins": self.shape("model.encoder.conv1.weight")[1],
            "max_source_positions": self.shape("model.encoder.embed_positions.weight")[0],
            "max_target_positions": self.shape("model.decoder.embed_positions.weight")[0],
            "activation_function": ACTIVATIONS[act],
            "tie_word_embeddings": True,
            "dtype": str(self.variables["decoder/embeddings/weight"].dtype).removeprefix("torch."),
            **made,
            **{name: self.generation_config[name] for name in ids},
        }

    def _generation_config(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """generation_config.json as Hugging Face has it. said: CTranslate2's config.json"""
        ids = self._special_ids()
        multilingual = self.shape("model.decoder.embed_tokens.weight")[0] >= MULTILINGUAL
        end = ids["<|endoftext|>"]
        languages = {text: id for text, id in ids.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", text)}
        several = {
            "lang_to_id": languages,
            "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        }
        return {
            "decoder_start_token_id": ids["<|startoftranscript|>"],
            "eos_token_id": end,
            "bos_token_id": end,
            "pad_token_id": end,
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "prev_sot_token_id": ids["<|startofprev|>"],
            "max_initial_timestamp_index": FIRST_SECOND,
            "suppress_tokens": said.get("suppress_ids", []),
            "begin_suppress_tokens": said.get("suppress_ids_begin", []),
            "is_multilingual": multilingual,
            "alignment_heads": said.get("alignment_heads", []),
            **(several if multilingual else {}),
        }

    def _special_ids(self) -> dict[str, int]:
        """The added tokens of tokenizer.json, as text -> id."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no tokenizer.json, which says the special ids")
        ids = {token["content"]: token["id"] for token in read_json(file).get("added_tokens", ())}
        needed = ("endoftext", "startoftranscript", "startofprev", "notimestamps", "transcribe", "translate")
        if absent := [text for one in needed if (text := f"<|{one}|>") not in ids]:
            raise CheckpointError(f"{file} has no {listing(absent)}")
        return ids
