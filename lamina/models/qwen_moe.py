"""Qwen 2 and 3 with experts, and OLMoE: in all or some layers the MLP is a mixture of experts.

https://arxiv.org/abs/2407.10671  https://arxiv.org/abs/2505.09388  https://arxiv.org/abs/2409.02060
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.decoder import layer_types, mlp_names
from lamina.models.olmo import Olmo2
from lamina.models.qwen import Qwen3, window_if_used
from lamina.models.transformer import Transformer
from lamina.nn import Choice, Mixture, RMSNorm, SelfAttention
from lamina.nn.moe.names import expert_names

MLP = "model.layers.{i}.mlp"


def is_dense(c: Config, layer: int) -> bool:
    """True if a layer has one dense MLP instead of experts."""
    sparse = c.first("num_experts", "num_local_experts") > 0 and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    return not sparse or layer in c.get("mlp_only_layers", ())


def mixture(c: Config, each: int, **options: Any) -> Mixture:
    """Scores are a softmax over all experts. each: default of `num_experts_per_tok`."""
    choice = Choice(c.get("num_experts_per_tok", each), normed=c.get("norm_topk_prob", False))
    inner = c.get("moe_intermediate_size") or c.intermediate_size
    experts = c.first("num_experts", "num_local_experts")
    return Mixture(c.hidden_size, experts, inner, c.get("hidden_act", "silu"), choice, **options)


class Qwen2Moe(Transformer):
    """A shared expert beside the others, with a gate, which is one more row of the router's matrix."""

    no_effect = ("intermediate_size", "sliding_window")  # of dense layers and of windows, which few have
    defaults = {"moe_intermediate_size": 1408}
    names = Transformer.names | {
        "blocks.{i}.mlp.router": (f"{MLP}.gate", f"{MLP}.shared_expert_gate"),
        **expert_names("blocks.{i}.mlp.experts", f"{MLP}.experts"),
        **mlp_names("blocks.{i}.mlp.shared", f"{MLP}.shared_expert"),
    }

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        return super().make_attention(c, layer, bias=c.get("qkv_bias", True), out_bias=False, **options)

    def make_window(self, c: Config, layer: int) -> Window:
        """Where windows are used at all, every other layer has one, up to `max_window_layers`."""
        used, last = c.get("use_sliding_window", False), c.get("max_window_layers", 28)
        kinds = ["full_attention", "sliding_attention"]
        found = layer_types(c, kinds, lambda i: kinds[used and i % 2 == 0 and i < last])
        return window_if_used(c, found[layer])

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        if is_dense(c, layer):
            return super().make_mlp(c, layer)
        return mixture(c, 4, shared=c.get("shared_expert_intermediate_size", 5632), opens=True)


class Qwen3Moe(Qwen3):
    no_effect = (*Qwen3.no_effect, "intermediate_size")
    names = Transformer.names | {
        "blocks.{i}.mlp.router": f"{MLP}.gate",
        **expert_names("blocks.{i}.mlp.experts", f"{MLP}.experts"),
    }

    defaults = {"moe_intermediate_size": 768}

    def make_window(self, c: Config, layer: int) -> Window:
        return Sliding(c.get("sliding_window", 4096)) if c.get("use_sliding_window", False) else Full()

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return super().make_mlp(c, layer) if is_dense(c, layer) else mixture(c, 8)


class OlmoE(Transformer):
    """Norms of all queries and of all keys together."""

    names = Qwen3Moe.names
    eps = ("rms_norm_eps", 1e-5)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        heads, eps = c.num_attention_heads, c.get(*self.eps)
        counts = (heads, c.get("num_key_value_heads", heads))
        q_norm, k_norm = (RMSNorm(n * c.head_width, eps) for n in counts)
        clip = c.get("clip_qkv")
        return super().make_attention(c, layer, q_norm=q_norm, k_norm=k_norm, clip=clip, **options)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return mixture(c, 8)


class FlexOlmo(Olmo2):
    """OLMo 2 with experts."""

    names = Qwen3Moe.names | Olmo2.names
    eps = ("rms_norm_eps", 1e-6)
    rope_base = 500_000.0

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return mixture(c, 5)
