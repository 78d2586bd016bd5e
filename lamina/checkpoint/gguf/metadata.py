"""Metadata of a GGUF file as fields of config.json: those that all architectures share.

A key begins with the architecture, as in `llama.block_count`. What a file does not say is read from its tensors, if
they show it: biases, tied embeddings, and of which kind a layer is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lamina.checkpoint.gguf.header import StoredTensor
from lamina.errors import CheckpointError

ABSENT = object()
VARYING = {"gemma4"}
"""Architectures whose layers may differ in the number of key heads."""
DTYPES = {"F16": "float16", "BF16": "bfloat16"}


class Metadata:
    """The metadata of one file, by keys without the name of its architecture, and its tensors."""

    def __init__(self, values: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
        self.values, self.tensors = values, tensors
        self.architecture: str = values["general.architecture"]
        self.layers: int = self["block_count"] - self.get("nextn_predict_layers", 0)

    def __getitem__(self, key: str) -> Any:
        return self.values[f"{self.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def one(self, key: str, default: Any = ABSENT) -> Any:
        """A value that may be a list with an entry for each layer, zero in layers that do not have it."""
        found = self[key] if default is ABSENT else self.get(key, default)
        if not isinstance(found, list):
            return found
        several = sorted(set(found) - {0})
        if len(several) > 1 and self.architecture not in VARYING:
            raise CheckpointError(
                f"{self.architecture}.{key} is {found}, and a {self.architecture} GGUF is read only if all layers that "
                "have it have the same"
            )
        return several[0] if several else 0

    def with_tensor(self, name: str) -> list[int]:
        """The layers that have a tensor, such as attn_q.bias."""
        return [i for i in range(self.layers) if f"blk.{i}.{name}" in self.tensors]

    def rows(self, name: str) -> int:
        """How many rows a tensor has."""
        return self.tensors[name].shape[0]


def common_config(m: Metadata) -> dict[str, Any]:
    """Fields under the names that most families have for them; an architecture adds its own."""
    width, heads = m["embedding_length"], m.one("attention.head_count", 0)
    head_dim = m.get("attention.key_length", width // heads if heads else 0)
    ids = {kind: m.values.get(f"tokenizer.ggml.{key}_token_id") for kind, key in TOKENS.items()}
    rope = rope_parameters(m, head_dim)
    config = {
        "hidden_size": width,
        "num_hidden_layers": m.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": m.one("attention.head_count_kv", heads) or key_heads(m, head_dim),
        "head_dim": head_dim,
        "intermediate_size": m.get("feed_forward_length"),
        "rms_norm_eps": m.get("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": m.get("attention.layer_norm_epsilon"),
        "max_position_embeddings": m.get("context_length"),
        "vocab_size": m.rows("token_embd.weight"),
        "attention_bias": any(m.with_tensor(f"attn_{name}.bias") for name in ("q", "qkv", "kv_a_mqa")),
        "mlp_bias": True if m.with_tensor("ffn_up.bias") else None,
        "tie_word_embeddings": "output.weight" not in m.tensors,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        **expert_config(m),
    }
    config = {name: value for name, value in config.items() if value is not None}
    # quantized weights have no float type of their own: the default stands
    first = [tensor for name, tensor in m.tensors.items() if name.startswith("blk.0.") and len(tensor.shape) > 1]
    if first and (dtype := DTYPES.get(max(first, key=lambda t: math.prod(t.shape)).kind.name)) is not None:
        config["dtype"] = dtype
    return config | {f"{kind}_token_id": token for kind, token in ids.items()}


def key_heads(m: Metadata, head_dim: int) -> int:
    """The number of key heads by the size of the first layer that has keys; 0 without any."""
    layers = m.with_tensor("attn_k.weight")
    return m.rows(f"blk.{layers[0]}.attn_k.weight") // head_dim if layers else 0


TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def expert_config(m: Metadata) -> dict[str, Any]:
    """Fields of mixtures of experts; none if there are no experts."""
    if not (experts := m.get("expert_count", 0)):
        return {}
    return {
        "num_experts": experts,
        "num_experts_per_tok": m.get("expert_used_count"),
        "moe_intermediate_size": m.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.get("expert_shared_feed_forward_length"),
    }


def deepseek_experts(m: Metadata) -> dict[str, Any]:
    """Fields of DeepSeek V3's mixtures, and of others that chose their names."""
    return {
        "n_routed_experts": m.get("expert_count", 0),
        "n_shared_experts": m.get("expert_shared_count", 0),
        "n_group": m.get("expert_group_count", 1),
        "topk_group": m.get("expert_group_used_count", 1),
        "norm_topk_prob": m.get("expert_weights_norm", False),
        "routed_scaling_factor": m.get("expert_weights_scale", 0.0) or 1.0,  # 0 means that weights are not scaled
        "first_k_dense_replace": m.get("leading_dense_block_count", 0),
    }


def layer_types(m: Metadata, every: int, window: int = 0) -> dict[str, Any]:
    """The window, and which layers have it: as the file says, or all but every n-th one.

    every    which layers have no window if the file does not say; 1: all
    window   the window if the file does not say; 0: none
    """
    window = m.get("attention.sliding_window", window)
    pattern = m.get("attention.sliding_window_pattern", every)
    if not isinstance(pattern, list):
        pattern = [(i + 1) % pattern != 0 for i in range(m.layers)]
    kinds = ["sliding_attention" if windowed and window else "full_attention" for windowed in pattern[: m.layers]]
    return {"layer_types": kinds} | ({"sliding_window": window} if window else {})


def rope_parameters(m: Metadata, head_dim: int) -> dict[str, Any]:
    """Rotary parameters. Llama 3's scaling is stored as one divisor per frequency (rope_freqs.weight), that of longrope
    as two tensors of factors."""
    parameters: dict[str, Any] = {"rope_theta": float(m.get("rope.freq_base", 10000.0))}
    dim = m.get("rope.dimension_count", head_dim)
    if "rope.dimension_count" in m and 0 < dim <= head_dim:
        parameters["partial_rotary_factor"] = dim / head_dim
    if (stored := m.tensors.get("rope_freqs.weight")) is not None and m.architecture != "gemma4":
        return parameters | llama3_parameters(stored, parameters["rope_theta"], dim)
    length = m.get("rope.scaling.original_context_length")
    if "rope_factors_long.weight" in m.tensors:
        factors = {
            f"{name}_factor": m.tensors[f"rope_factors_{name}.weight"].data.reshape(-1).tolist()
            for name in ("long", "short")
        }
        scale = m.get("rope.scaling.attn_factor")
        more = {} if scale is None else {"attention_factor": float(scale)}
        return parameters | factors | more | {"rope_type": "longrope", "original_max_position_embeddings": length}
    kind = m.get("rope.scaling.type", "none")
    if kind == "none":
        return parameters | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"rope scaling {kind!r} is not read from GGUF; read are: none, linear, yarn, llama3, and longrope with "
            "rope_factors_long.weight"
        )
    parameters |= {"rope_type": kind, "factor": float(m["rope.scaling.factor"])}
    found = {"original_max_position_embeddings": length} | (
        {name: m.get(f"rope.scaling.{key}") for name, key in YARN.items()} if kind == "yarn" else {}
    )
    return parameters | {name: value for name, value in found.items() if value is not None}


YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}


def llama3_parameters(stored: StoredTensor, theta: float, dim: int) -> dict[str, Any]:
    """The settings of Llama 3's scaling that give these divisors. The constants that a file does not have are the same
    in every Llama 3 release; Llama 4 has another `high_freq_factor`."""
    divisors = torch.from_numpy(stored.data).float()
    for high in (4.0, 1.0):
        parameters = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": round(float(divisors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": 8192,
        }
        if torch.allclose(divisors, llama3_divisors(parameters, dim), rtol=1e-3):
            return parameters
    raise CheckpointError("rope_freqs.weight holds divisors that Llama 3's scaling does not give")


def llama3_divisors(parameters: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """What Llama 3's scaling divides each rotary frequency by: 1 for short waves, `factor` for long ones."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    waves = 2 * math.pi * parameters["rope_theta"] ** exponent
    turns = parameters["original_max_position_embeddings"] / waves  # in the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: torch.Tensor = 1 / ((1 - smooth) / parameters["factor"] + smooth)
    return divisors.float()
