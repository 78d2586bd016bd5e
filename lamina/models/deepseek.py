"""DeepSeek V2 and V3: multi-head latent attention (MLA) and many small experts.

The cache stores only one latent and one rotary key per token (`LatentAttention`). The first layers have a dense MLP; in
the others a token uses the shared expert and its best routed experts, which may have to come from a few groups.

https://arxiv.org/abs/2405.04434  https://arxiv.org/abs/2412.19437
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lamina.checkpoint.names import Value
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import mlp_names
from lamina.models.transformer import Transformer
from lamina.nn import Choice, GatedMLP, LatentAttention, Mixer, Mixture, Rotary
from lamina.nn.moe.names import expert_names


def latent_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of `LatentAttention`."""
    return {
        f"{ours}.q_kv": (f"{theirs}.q_proj", f"{theirs}.kv_a_proj_with_mqa"),
        f"{ours}.kv_bias": f"{theirs}.kv_a_proj_with_mqa.bias",
        f"{ours}.down": (f"{theirs}.q_a_proj", f"{theirs}.kv_a_proj_with_mqa"),
        f"{ours}.q_norm": f"{theirs}.q_a_layernorm",
        f"{ours}.q_up": f"{theirs}.q_b_proj",
        f"{ours}.kv_norm": f"{theirs}.kv_a_layernorm",
        f"{ours}.kv_up": f"{theirs}.kv_b_proj.weight",
        f"{ours}.out": f"{theirs}.o_proj",
    }


def mixture_names(ours: str, theirs: str) -> dict[str, Value]:
    """Parameter names of a `balanced_mixture`, or of the dense MLP of the first layers."""
    return {
        **mlp_names(ours, theirs),
        f"{ours}.router.weight": f"{theirs}.gate.weight",
        f"{ours}.router.bias": f"{theirs}.gate.e_score_correction_bias",
        **expert_names(f"{ours}.experts", f"{theirs}.experts"),
        **mlp_names(f"{ours}.shared", f"{theirs}.shared_experts"),
    }


def balanced_mixture(c: Config) -> Mixture:
    """Scores are sigmoids; a bias, which balances the load in training, takes part in the choice only."""
    experts, groups, inner = c.n_routed_experts, c.get("n_group", 1), c.moe_intermediate_size
    if experts % groups or (groups > 1 and experts < 2 * groups):
        raise InputError(
            f"n_routed_experts={experts} cannot be divided into n_group={groups} groups of two experts or more"
        )
    choice = Choice(
        c.num_experts_per_tok, "sigmoid", normed=c.get("norm_topk_prob", True),
        factor=c.get("routed_scaling_factor", 1.0), groups=groups, groups_each=c.get("topk_group", 1),
    )  # fmt: skip
    return Mixture(
        c.hidden_size, experts, inner, c.get("hidden_act", "silu"), choice, shared=inner * c.get("n_shared_experts", 0),
        balanced=True, exact=True,
    )  # fmt: skip


def prediction_layers(c: Config, default: int = 1) -> tuple[str, ...]:
    """Patterns of tensors of the layers for multi-token prediction, which come after the last layer."""
    ahead = c.get("num_nextn_predict_layers", c.get("num_mtp_layers", default))
    return tuple(f"model.layers.{i}.*" for i in range(c.num_hidden_layers, c.num_hidden_layers + ahead))


class DeepseekV2(Transformer):
    no_effect: tuple[str, ...] = ("num_key_value_heads", "head_dim", "qk_head_dim", "n_group", "topk_group")
    aliases: ClassVar[Mapping[str, str]] = {"n_routed_experts": "num_experts"}
    defaults: ClassVar[dict[str, Any]] = dict(
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, moe_intermediate_size=1407,
    )  # fmt: skip
    names = Transformer.names | {
        **latent_names("blocks.{i}.attention", "model.layers.{i}.self_attn"),
        **mixture_names("blocks.{i}.mlp", "model.layers.{i}.mlp"),
    }

    interleaves: ClassVar[tuple[bool, ...]] = (True,)
    """Known values of `rope_interleave`."""

    def __init__(self, c: Config) -> None:
        c.require("rope_interleave", self.interleaves, True)
        super().__init__(c)

    def make_mixer(self, c: Config, layer: int) -> Mixer:
        return LatentAttention(c)

    def make_rope(self, c: Config) -> Rotary:
        return Rotary.of(c, c.qk_rope_head_dim, self.rope_base)

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return super().make_mlp(c, layer) if layer < c.get("first_k_dense_replace", 0) else self.make_mixture(c)

    def make_mixture(self, c: Config) -> Mixture:
        """Scores are a softmax over all experts. A token's experts come from the groups with the best experts."""
        c.require("scoring_func", ("softmax",), "softmax")
        c.require("norm_topk_prob", (False,), False)
        c.require("moe_layer_freq", (1,), 1)
        grouped = c.require("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
        limits = dict(groups=c.n_group, groups_each=c.topk_group, group_best=1) if grouped else {}
        choice = Choice(c.num_experts_per_tok, factor=c.get("routed_scaling_factor", 1.0), **limits)
        width, inner, act = c.hidden_size, c.moe_intermediate_size, c.get("hidden_act", "silu")
        shared = GatedMLP(width, inner * c.get("n_shared_experts", 2), act, c.get("mlp_bias", False))
        return Mixture(width, c.n_routed_experts, inner, act, choice, shared=shared, exact=True)


class DeepseekV3(DeepseekV2):
    no_effect: tuple[str, ...] = ("num_key_value_heads", "qk_head_dim")
    aliases = {"n_routed_experts": "num_local_experts"}
    interleaves: ClassVar[tuple[bool, ...]] = (True, False)
    defaults = dict(
        n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=1, first_k_dense_replace=3,
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8,
    )  # fmt: skip

    def __init__(self, c: Config) -> None:
        c.require("head_dim", (c.qk_rope_head_dim,), c.qk_rope_head_dim)  # by which transformers rotates
        c.require("scoring_func", ("sigmoid",), "sigmoid")
        c.require("topk_method", ("noaux_tc",), "noaux_tc")
        c.require("moe_layer_freq", (1,), 1)
        super().__init__(c)
        self.ignored = (*self.ignored, *prediction_layers(c))

    def make_mixture(self, c: Config) -> Mixture:
        return balanced_mixture(c)


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7 Flash."""

    aliases = {**DeepseekV3.aliases, "qk_rope_head_dim": "head_dim"}
    defaults = dict(
        n_group=1, topk_group=1, routed_scaling_factor=1.8, n_shared_experts=1, kv_lora_rank=512, q_lora_rank=768,
        qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, moe_intermediate_size=1536, n_routed_experts=64,
        num_experts_per_tok=4, rms_norm_eps=1e-5,
    )  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        kinds = c.get("mlp_layer_types") or ["dense"]
        dense = kinds[layer] == "dense" if layer < len(kinds) else False
        return super().make_mlp(c.with_values(first_k_dense_replace=layer + dense), layer)
