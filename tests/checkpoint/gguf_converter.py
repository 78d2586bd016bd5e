"""Writes a folder of safetensors as a GGUF file, stored as published GGUF files store that architecture.

Names come from the table of the package gguf, which says what the original of each tensor is called. What else is
changed (row orders, norms with one added, stacked experts …) is done here, by a function per architecture.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]
Fields = dict[str, Any]
Step = Callable[[Tensors, Fields], Tensors]

COMMON = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
}
"""Key without the architecture -> the field of config.json."""


@dataclass(frozen=True)
class Format:
    """How an architecture is written. keys: metadata beside the common; a value of None takes one away."""

    architecture: str
    steps: tuple[Step, ...] = ()
    keys: Callable[[Fields], Fields] = lambda c: {}
    names: Mapping[str, str] | None = None  # patterns of names that the table lacks -> GGUF name


def write_gguf(folder: Path, form: Format, path: Path, kind_of: Callable[[str], Any] = lambda name: None) -> Path:
    """kind_of: what a tensor is quantized to, by its GGUF name; None: float32"""
    c = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for step in form.steps:
        tensors = step(tensors, c)
    keys = common_keys(c) | form.keys(c)
    writer = gguf.GGUFWriter(str(path), form.architecture)
    for key, value in keys.items():
        if value is not None:
            add(writer, f"{form.architecture}.{key}", value)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    table = gguf.get_tensor_name_map(kind, keys["block_count"])
    for name, tensor in tensors.items():
        name, values = gguf_name(name, table, form.names or {}), tensor.contiguous().numpy()
        if (quantized := kind_of(name)) is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: Any, key: str, value: Any) -> None:
    kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def gguf_name(name: str, table: Any, own: Mapping[str, str]) -> str:
    for pattern, theirs in own.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, theirs, name)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def common_keys(c: Fields) -> Fields:
    found: Fields = {}
    for key, names in COMMON.items():
        value = next((c[name] for name in names if c.get(name) is not None), None)
        if value is not None:
            found[key] = value
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if (theta := rope.get("rope_theta")) is not None:
        found["rope.freq_base"] = float(theta)
    dim = c.get("head_dim") or found["embedding_length"] // (found.get("attention.head_count") or 1)
    if (part := rope.get("partial_rotary_factor")) is not None:
        found["rope.dimension_count"] = int(dim * part)
    if rope.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        betas = {f"rope.scaling.yarn_{name}": rope.get(name) for name in ("beta_fast", "beta_slow")}
        found |= {key: float(value) for key, value in betas.items() if value is not None}
    return found


# --- steps


def renamed(pattern: str, name: str) -> Step:
    return lambda tensors, c: {re.sub(pattern, name, old): t for old, t in tensors.items()}


def changed(pattern: str, fn: Callable[[Tensor, Fields], Tensor]) -> Step:
    return lambda tensors, c: {n: fn(t, c) if re.search(pattern, n) else t for n, t in tensors.items()}


def split(pattern: str, names: tuple[str, ...], fn: Callable[[Tensor, Fields], Any]) -> Step:
    """Makes several tensors of one; names replace the pattern."""

    def step(tensors: Tensors, c: Fields) -> Tensors:
        found: Tensors = {}
        for old, t in tensors.items():
            if re.search(pattern, old):
                found |= {re.sub(pattern, name, old): one for name, one in zip(names, fn(t, c), strict=True)}
            else:
                found[old] = t
        return found

    return step


def pair_rows(t: Tensor, heads: int) -> Tensor:
    """Halves of a head become pairs of neighbours."""
    return t.reshape(heads, 2, t.shape[0] // heads // 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape)


paired: tuple[Step, ...] = (
    changed(r"q_proj\.\w+$", lambda t, c: pair_rows(t, c["num_attention_heads"])),
    changed(r"k_proj\.\w+$", lambda t, c: pair_rows(t, c["num_key_value_heads"])),
)
paired_weights: tuple[Step, ...] = (
    changed(r"q_proj\.weight$", lambda t, c: pair_rows(t, c["num_attention_heads"])),
    changed(r"k_proj\.weight$", lambda t, c: pair_rows(t, c["num_key_value_heads"])),
)
plus_one = changed(r"norm\.weight$", lambda t, c: t + 1)
transposed = changed(r"(c_attn|c_proj|c_fc)\.weight$", lambda t, c: t.T)
decays = changed(r"A_log$", lambda t, c: -t.exp())
kernels = changed(r"conv1d\.weight$|conv\.conv\.weight$", lambda t, c: t.squeeze(1))
columns = changed(r"(A_log|\.D)$", lambda t, c: t[:, None])
dt_bias = renamed(r"\.dt_bias$", ".dt_proj.bias")


def stacked(tensors: Tensors, c: Fields) -> Tensors:
    """Matrices of single experts become one stack."""
    single = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")
    groups: dict[str, dict[int, Tensor]] = {}
    for name, t in tensors.items():
        if match := single.fullmatch(name):
            groups.setdefault(f"{match[1]}.{match[3]}.weight", {})[int(match[2])] = t
    rest = {name: t for name, t in tensors.items() if not single.fullmatch(name)}
    return rest | {name: torch.stack([found[e] for e in range(len(found))]) for name, found in groups.items()}


def head_norms(tensors: Tensors, c: Fields) -> Tensors:
    """StableLM: norms of single heads become one tensor."""
    return {
        name.replace("experts", "norms").replace(".scale.", ".").replace("norms.weight", "weight"): t
        for name, t in stacked(
            {re.sub(r"norms\.(\d+)\.weight", r"experts.\1.scale.weight", n): t for n, t in tensors.items()}, c
        ).items()
    }


def by_part(t: Tensor, groups: int, *sizes: int) -> list[Tensor]:
    """Rows of groups, each with several parts -> the rows of each part, group after group."""
    return [part.flatten(0, 1) for part in t.unflatten(0, (groups, sum(sizes))).split(sizes, 1)]


def bloom_rows(t: Tensor, c: Fields) -> Tensor:
    heads = c["n_head"]
    return torch.cat(by_part(t, heads, *[t.shape[0] // heads // 3] * 3))


def falcon_rows(t: Tensor, c: Fields) -> Tensor:
    heads, groups = c["num_attention_heads"], falcon_groups(c)
    dim = c["hidden_size"] // heads
    return torch.cat(by_part(t, groups, heads // groups * dim, dim, dim))


def falcon_groups(c: Fields) -> int:
    if c["new_decoder_architecture"]:
        return c["num_kv_heads"]
    return 1 if c["multi_query"] else c["num_attention_heads"]


def latents(t: Tensor, c: Fields) -> tuple[Tensor, Tensor]:
    """Makes of latents: keys, transposed, and values."""
    nope, v = c["qk_nope_head_dim"], c["v_head_dim"]
    keys, values = t.unflatten(0, (-1, nope + v)).split([nope, v], 1)
    return keys.transpose(1, 2), values


latent = split(r"kv_b_proj\.", ("k_b_proj.", "v_b_proj."), latents)


def latent_keys(c: Fields) -> Fields:
    rotary, rank = c["qk_rope_head_dim"], c["kv_lora_rank"]
    mscale = c.get("rope_parameters", {}).get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": c["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": rotary,
        "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
        "expert_weights_norm": c.get("norm_topk_prob") or None,
    }


def mamba_keys(c: Fields) -> Fields:
    found = {"ssm.conv_kernel": c["conv_kernel"], "ssm.state_size": c["state_size"]}
    return found | {
        "attention.head_count": 0, "attention.layer_norm_rms_epsilon": c["layer_norm_epsilon"],
        "attention.layer_norm_epsilon": None, "context_length": 2**20, "feed_forward_length": 0,
        "attention.key_length": None, "attention.value_length": None,
    }  # fmt: skip


def hybrid_keys(c: Fields) -> Fields:
    return {
        "ssm.conv_kernel": c["mamba_d_conv"],
        "ssm.state_size": c["mamba_d_state"],
        "ssm.group_count": c.get("mamba_n_groups"),
        "ssm.time_step_rank": c.get("mamba_n_heads"),
        "ssm.inner_size": c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"],
    }


def by_layer(value: int, kinds: list[str], kind: str) -> list[int]:
    return [value if one == kind else 0 for one in kinds]


def delta_keys(c: Fields) -> Fields:
    heads = c["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * c["linear_value_head_dim"],
        "full_attention_interval": 4,
    }


def qkvz(t: Tensor, c: Fields) -> tuple[Tensor, Tensor]:
    keys, key = c["linear_num_key_heads"], c["linear_key_head_dim"]
    value = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
    q, k, v, z = by_part(t, keys, key, key, value, value)
    return torch.cat([q, k, v]), z


def tiled(dim: int | None = None) -> Callable[[Tensor, Fields], Tensor]:
    """Value heads of Qwen3.5: the first of each key head, then the second of each …"""

    def fn(t: Tensor, c: Fields) -> Tensor:
        keys, values, size = c["linear_num_key_heads"], c["linear_num_value_heads"], dim or c["linear_value_head_dim"]
        rest, heads = t[: -values * size], t[-values * size :]
        return torch.cat([rest, heads.unflatten(0, (keys, values // keys, size)).transpose(0, 1).flatten(0, 2)])

    return fn


def factors(tensors: Tensors, c: Fields) -> Tensors:
    """Falcon-H1: weights are stored times the fixed factors."""
    inner, groups = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
    rows = torch.cat([
        torch.full((size,), factor)
        for size, factor in zip((inner, inner, groups, groups, c["mamba_n_heads"]), c["ssm_multipliers"], strict=True)
    ])  # fmt: skip
    gate, down = c["mlp_multipliers"]
    inward, outward = c["attention_in_multiplier"], c["attention_out_multiplier"]
    times: dict[str, Any] = {
        "down_proj": down, "gate_proj": gate, "k_proj": c["key_multiplier"] * inward, "q_proj": inward,
        "v_proj": inward, "o_proj": outward, "out_proj": c["ssm_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"] * rows[:, None],
        "lm_head": c["lm_head_multiplier"], "embed_tokens": c["embedding_multiplier"],
    }  # fmt: skip
    return {name: t * times.get(name.split(".")[-2], 1.0) for name, t in tensors.items()}


def deviations(c: Fields) -> list[float]:
    return [NormalDist().inv_cdf(share) if share > 0 else -math.inf for share in c["activation_sparsity_pattern"]]


def windows(c: Fields) -> Fields:
    pattern = [kind == "sliding_attention" for kind in c["layer_types"]]
    return window(c) | {"attention.sliding_window_pattern": pattern}


def window(c: Fields) -> Fields:
    return {"attention.sliding_window": c["sliding_window"]}


def rotates_all(c: Fields) -> Fields:
    return {"rope.dimension_count": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]}


def local_base(c: Fields) -> Fields:
    return {"rope.freq_base_swa": float(c["rope_parameters"]["sliding_attention"]["rope_theta"])}


def constant(name: str, make: Callable[[Fields], list[float]]) -> Step:
    """Adds a tensor that is computed from the configuration."""
    return lambda tensors, c: tensors | {name: torch.tensor(make(c))}
