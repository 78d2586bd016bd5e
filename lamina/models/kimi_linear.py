"""Kimi Linear: three layers of delta attention for each layer of latent attention (no RoPE), with many small experts.

https://arxiv.org/abs/2510.26692
"""

from __future__ import annotations

from torch import nn

from lamina.checkpoint.names import Value, either
from lamina.config import Config
from lamina.models.decoder import layer_types
from lamina.models.deepseek import balanced_mixture, latent_names, mixture_names
from lamina.models.transformer import Transformer
from lamina.nn import ChannelDeltaMixer, LatentAttention, Mixer, Rotary, channel_delta_names
from lamina.nn.moe.names import expert_names

LAYER = "model.layers.{i}"


class KimiLinear(Transformer):
    aliases = {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
    no_effect = ("linear_attn_config.kda_layers", "head_dim", "qk_head_dim", "num_key_value_heads")
    eps = ("rms_norm_eps", 1e-5)

    def __init__(self, c: Config) -> None:
        c.require("moe_router_activation_func", ("sigmoid",), "sigmoid")
        c.require("moe_layer_freq", (1,), 1)
        c.require("mla_use_nope", (True,), True)
        c.require("use_grouped_topk", (True,), True)
        c.require("num_nextn_predict_layers", (0,), 0)
        given = c.get("linear_attn_config", {})
        c = c.with_defaults({
            "n_routed_experts": c.get("num_local_experts", 256), "num_experts_per_tok": 8, "n_shared_experts": 1,
            "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1024,
        }).with_values(
            linear_head_dim=given.get("head_dim", c.get("linear_head_dim", 128)),
            linear_num_heads=given.get("num_heads", c.get("linear_num_heads", 32)),
            linear_conv_kernel_dim=given.get("short_conv_kernel_size", c.get("linear_conv_kernel_dim", 4)),
            layer_types=kinds(c), rope_parameters=None, rope_scaling=None,
        )  # fmt: skip
        super().__init__(c)
        attention = f"{LAYER}.self_attn"
        self.names = Transformer.names | {
            **latent_names("blocks.{i}.attention", attention),
            **channel_delta_names("blocks.{i}.attention", attention, c.linear_head_dim),
            **mlp_names_of_either("blocks.{i}.mlp", f"{LAYER}.mlp", f"{LAYER}.block_sparse_moe"),
        }

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        if c.layer_types[layer] == "full_attention":
            return LatentAttention(c)
        return ChannelDeltaMixer(
            c.hidden_size, c.linear_num_heads, c.linear_head_dim, c.linear_conv_kernel_dim,
            eps=c.get(*self.eps), act=c.get(*self.act),
        )  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        dense = ["dense"] * c.get("first_k_dense_replace", 1) + ["sparse"] * c.num_hidden_layers
        return super().make_mlp(c, layer) if c.get("mlp_layer_types", dense)[layer] == "dense" else balanced_mixture(c)

    def make_rope(self, c: Config) -> Rotary:
        """Rotates by zero: the shared key of latent attention has no position."""
        still = {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.0}
        return Rotary(c.qk_rope_head_dim, still, c.get("max_position_embeddings"))


def mlp_names_of_either(ours: str, *theirs: str) -> dict[str, Value]:
    """Published files have `mlp` in dense layers and `block_sparse_moe` in others; transformers writes one for both."""
    experts = expert_names(f"{ours}.experts", *(f"{one}.experts" for one in theirs), parts=("w1", "w3", "w2"))
    return either(*(mixture_names(ours, one) for one in theirs)) | experts


def kinds(c: Config) -> list[str]:
    """The type of each layer; `linear_attn_config` counts layers from one."""
    given = c.get("linear_attn_config", {})
    attends = given.get("full_attn_layers")

    def otherwise(i: int) -> str:
        full = (i > 0 and i % 4 == 0) if attends is None else i + 1 in attends
        return "full_attention" if full else "linear_attention"

    return list(layer_types(c, ["full_attention", "linear_attention"], otherwise))
