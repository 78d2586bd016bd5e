"""A GGUF file, presented as the Hugging Face checkpoint it was made from.

The metadata becomes a config.json-like dict, tensor names become Hugging Face names, and a tensor is
dequantized when it is read. llama files store the rows of the query and key projections in another order
(rotary pairs side by side instead of half a head apart); reading puts them back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.checkpoint.gguf.header import StoredTensor
from lamina.checkpoint.gguf.split import read_parts
from lamina.checkpoint.source import Checkpoint
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

ROWS_AT_ONCE = 4096  # dequantized together, so that scratch stays far below the tensor itself


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture is presented."""

    config: Callable[[Mapping[str, Any], Mapping[str, StoredTensor]], dict[str, Any]]
    names: dict[str, str]  # GGUF module -> Hugging Face module; {i} is the layer
    paired: dict[str, str]  # GGUF module with rows in rotary pairs -> the config key of its number of heads
    derived: frozenset[str]  # tensors that the configuration already says
    model_types: tuple[str, ...] = ()  # the families that have such files; the one of the same name if empty


class GGUFCheckpoint(Checkpoint):
    """One .gguf file, or all parts of a split one, mapped copy-on-write (never written)."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401
        except ImportError as error:
            raise CheckpointError(f"reading {path} needs the gguf package: pip install gguf") from error
        self.path = path
        self.metadata, tensors = read_parts(path)
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            supported = ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(f"{path} has architecture {name!r}; GGUF files are read for: {supported}")
        self._architecture = ARCHITECTURES[name]
        try:
            self.config = self._architecture.config(self.metadata, tensors)
        except KeyError as error:
            raise CheckpointError(f"{path} lacks {error.args[0]}, which {name} needs") from error
        self.generation_config = {}
        self._stored = {
            self._present(name): tensor for name, tensor in tensors.items() if name not in self._architecture.derived
        }

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
        return tuple(dict.fromkeys(self.metadata[key] for key in keys if key in self.metadata))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> torch.Tensor:
        from gguf import GGMLQuantizationType, dequantize

        tensor = self._tensor(name)
        kind, shape = tensor.kind, tensor.shape
        raw = torch.from_numpy(tensor.data)  # [..., bytes of a row], or numbers where torch has the type
        heads = self._architecture.paired.get(re.sub(r"^blk\.\d+\.(.*)\.\w+$", r"\1", tensor.name))
        if heads is not None:
            raw = unpair_rows(raw, self.config[heads])
        if raw.dtype != torch.uint8:
            return raw
        if kind == GGMLQuantizationType.BF16:
            return raw.view(torch.bfloat16)
        rows = raw.reshape(-1, raw.shape[-1])
        result = torch.empty(rows.shape[0], shape[-1])
        for start in range(0, rows.shape[0], ROWS_AT_ONCE):
            block = rows[start : start + ROWS_AT_ONCE]
            try:
                result[start : start + len(block)] = torch.from_numpy(dequantize(block.numpy(), kind))
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{self.path}: {tensor.name} is {kind.name}, which gguf cannot dequantize"
                ) from error
        return result.view(shape)

    def tokenizer(self) -> Tokenizer | None:
        from lamina.checkpoint.gguf.tokenizer import gguf_tokenizer  # tokenizers is slow to import

        return gguf_tokenizer(self.metadata, self.eos_ids)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return self._stored[name]

    def _present(self, name: str) -> str:
        """The Hugging Face name; a tensor nothing is known about keeps its own."""
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(.+)\.(\w+)", name)
        if match is None:
            return name
        layer, module, leaf = match.groups()
        pattern = self._architecture.names.get(module if layer is None else "blk.{i}." + module)
        return name if pattern is None else f"{pattern.replace('{i}', layer or '')}.{leaf}"


def unpair_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama GGUF files: pairs (0, 1), (2, 3) … become halves, inside each head.

    >>> unpair_rows(torch.tensor([0, 10, 1, 11]), heads=1).tolist()
    [0, 1, 10, 11]
    """
    # [H * D, ...] -> [H, D/2, 2, ...] -> [H, 2, D/2, ...]
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def llama_config(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    def value(key: str) -> Any:
        return metadata[f"llama.{key}"]

    if metadata.get("llama.expert_count", 0) > 0:
        count = metadata["llama.expert_count"]
        raise CheckpointError(f"this llama GGUF has {count} experts (Mixtral); only dense llama is read from GGUF")
    width, heads = value("embedding_length"), value("attention.head_count")
    key_heads = metadata.get("llama.attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(key_heads, list):
        raise CheckpointError("this llama GGUF has another number of heads in each layer, which llama does not")
    head_dim = metadata.get("llama.attention.key_length", width // heads)
    rotary = metadata.get("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise CheckpointError(f"this llama GGUF rotates {rotary} of {head_dim} head dimensions; llama rotates all")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "intermediate_size": value("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": value("context_length"),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope_parameters(metadata, tensors, head_dim),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    # quantized weights have no float type of their own: the default stands
    kind = tensors["blk.0.attn_q.weight"].kind.name
    if (dtype := {"F16": "float16", "BF16": "bfloat16"}.get(kind)) is not None:
        config["dtype"] = dtype
    return config


def rope_parameters(metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], head_dim: int) -> dict[str, Any]:
    """Rotary parameters. Llama 3's scaling is stored as one divisor per frequency (rope_freqs.weight)."""
    theta = float(metadata.get("llama.rope.freq_base", 10000.0))
    if (stored := tensors.get("rope_freqs.weight")) is not None:
        divisors = torch.from_numpy(stored.data).float()
        # the other constants are the same in every Llama 3 release, and are not in the file
        parameters = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": round(float(divisors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not torch.allclose(divisors, llama3_divisors(parameters, head_dim), rtol=1e-3):
            raise CheckpointError("rope_freqs.weight holds divisors that Llama 3's scaling does not give")
        return parameters
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"rope scaling {kind!r} is not read from GGUF; read are: none, linear, yarn, llama3")
    parameters = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": float(metadata["llama.rope.scaling.factor"]),
    }
    if (length := metadata.get("llama.rope.scaling.original_context_length")) is not None:
        parameters["original_max_position_embeddings"] = length
    return parameters


def llama3_divisors(parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """What Llama 3's scaling divides each rotary frequency by: 1 for short waves, `factor` for long ones."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    waves = 2 * math.pi * parameters["rope_theta"] ** exponent
    turns = parameters["original_max_position_embeddings"] / waves  # in the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: torch.Tensor = 1 / ((1 - smooth) / parameters["factor"] + smooth)
    return divisors.float()


ARCHITECTURES = {
    "llama": Architecture(
        config=llama_config,
        names={
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
            "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
            "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
            "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
            "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
            "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
            "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
            "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
            "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
            "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
        },
        paired={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        derived=frozenset({"rope_freqs.weight"}),
    )
}
