"""Formats of earlier GGUF files, and architectures of which another one is usual."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from tests.checkpoint.gguf_converter import Fields, Format, delta_keys, latent_keys, paired, rotates_all, stacked
from tests.checkpoint.gguf_formats import FORMATS, NEXT, W, only_dense


def joined_qkv(tensors: Any, c: Fields) -> Any:
    found = {n: t for n, t in tensors.items() if not re.search(r"self_attn\.[qkv]_proj", n)}
    for name in tensors:
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("self_attn.q_proj", "self_attn.qkv_proj")] = torch.cat(parts)
    return found


def whole_latents(c: Fields) -> Fields:
    dim = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    return latent_keys(c) | {
        "attention.head_count_kv": c["num_attention_heads"], "attention.key_length": dim,
        "attention.value_length": c["v_head_dim"], "attention.key_length_mla": None, "attention.value_length_mla": None,
    }  # fmt: skip


ONE_EXPERT = {
    rf"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.{w}\.weight": rf"blk.\1.ffn_{name}.\2.weight"
    for w, name in W.items()
}
OLDER = {
    "a tensor per expert": Format("llama", paired, rotates_all, ONE_EXPERT),
    "latents in one tensor": Format("deepseek2", (stacked,), whole_latents),
    "queries, keys and values in one tensor": Format(
        "phi2", (joined_qkv,), only_dense, {r"model\.layers\.(\d+)\.self_attn\.qkv_proj\.(\w+)": r"blk.\1.attn_qkv.\2"}
    ),
    "rows by key head": Format(
        "qwen3next", NEXT, delta_keys,
        {r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight": r"blk.\1.ssm_in.weight"},
    ),
    "mistral3": Format("mistral3", paired, rotates_all),
    "nemotron_h": replace(FORMATS["nemotron_h"], architecture="nemotron_h"),
}  # fmt: skip
