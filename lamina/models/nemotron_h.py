"""Nemotron-H: every layer is one of four: Mamba-2, attention (no RoPE), an MLP, or experts; x + layer(norm(x)).

https://arxiv.org/abs/2504.03624
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import Either, Names, either
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import mlp_names, qkv_names
from lamina.models.transformer import Transformer
from lamina.nn import MLP, Choice, GatedRMSNorm, Mamba2Mixer, Mixture, Norm, Positions, SelfAttention, mamba2_names
from lamina.nn.moe.names import expert_names

PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
UNUSED = (  # not read by transformers, or about multi-token prediction
    "attention_bias", "expand", "mamba_proj_bias", "moe_shared_expert_overlap", "mtp_layers_block_type",
    "mtp_hybrid_override_pattern", "n_shared_experts", "num_nextn_predict_layers", "residual_in_fp32", "sliding_window",
    "time_step_limit", "mamba_dt_limit", "mamba_dt_max", "mamba_dt_init_floor", "mamba_expand",
    "max_position_embeddings", "rms_norm_eps", "norm_eps", "time_step_rank", "rope_theta", "partial_rotary_factor",
    "intermediate_size",  # of MLP layers, where there are any
)  # fmt: skip
OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class SingleBlock(nn.Module):
    """x + mixer(norm(x)), or x + mlp(norm(x))."""

    def __init__(self, norm: Norm, part: Mamba2Mixer | SelfAttention | MLP | Mixture) -> None:
        super().__init__()
        self.norm, self.mixer = norm, part
        self.specs: LayerSpecs = part.specs if isinstance(part, Mamba2Mixer | SelfAttention) else {}

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = self.norm(x)
        return self.mixer(y, memory, shared, onto=x) if self.specs else self.mixer(y, onto=x)


def tensor_names(prefix: str) -> Names:
    ours, theirs = "blocks.{i}.mixer", f"{prefix}.layers.{{i}}.mixer"
    return {
        "embedding": f"{prefix}.embeddings",
        "blocks.{i}.norm": f"{prefix}.layers.{{i}}.norm",
        **mamba2_names(ours, theirs),
        **qkv_names(ours, theirs),
        f"{ours}.out": Either(f"{theirs}.out_proj", f"{theirs}.o_proj"),
        **mlp_names(ours, theirs),
        f"{ours}.router.weight": f"{theirs}.gate.weight",
        f"{ours}.router.bias": f"{theirs}.gate.e_score_correction_bias",
        **expert_names(f"{ours}.experts", f"{theirs}.experts", parts=("up_proj", "down_proj")),
        **mlp_names(f"{ours}.shared", f"{theirs}.shared_experts"),
        f"{ours}.enter": f"{theirs}.fc1_latent_proj",
        f"{ours}.leave": f"{theirs}.fc2_latent_proj",
        "norm": f"{prefix}.norm_f",
        "head": "lm_head",
    }


class NemotronH(Transformer):
    names = either(tensor_names("backbone"), tensor_names("model"))
    ignored = ("mtp.*",)
    no_effect = UNUSED
    aliases = {
        "head_dim": "attention_head_dim",
        "n_routed_experts": "num_local_experts",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "time_step_min": "mamba_dt_min",
        "use_conv_bias": "mamba_conv_bias",
    }
    defaults = {"num_key_value_heads": 8, "head_dim": 128}
    eps = ("layer_norm_epsilon", 1e-5)
    act = ("mlp_hidden_act", "relu2")

    def __init__(self, c: Config) -> None:
        super().__init__(c.with_values(num_hidden_layers=len(kinds(c))))

    def make_block(self, c: Config, layer: int) -> SingleBlock:
        match kinds(c)[layer]:
            case "linear_attention":
                return SingleBlock(self.make_norm(c), self.make_mamba(c))
            case "full_attention":
                return SingleBlock(
                    self.make_norm(c), self.make_attention(c, layer, bias=False, out_bias=False, rope=None)
                )
            case "mlp":
                return SingleBlock(self.make_norm(c), self.make_mlp(c, layer))
        return SingleBlock(self.make_norm(c), self.make_mixture(c))

    def make_mamba(self, c: Config) -> Mamba2Mixer:
        heads, head_dim, groups = c.get("mamba_num_heads", 128), c.get("mamba_head_dim", 64), c.get("n_groups", 8)
        bias = c.get("use_bias", False)
        return Mamba2Mixer(
            c.hidden_size, heads, head_dim, c.get("ssm_state_size", 128), groups, c.get("conv_kernel", 4),
            act=c.get("mamba_hidden_act", "silu"), bias=bias, out_bias=bias, conv_bias=c.get("use_conv_bias", True),
            dt_limit=(c.get("time_step_min", 0.001), math.inf),
            norm=GatedRMSNorm(heads * head_dim, c.get(*self.eps), groups=groups),
        )  # fmt: skip

    def make_mlp(self, c: Config, layer: int) -> MLP:
        return MLP(c.hidden_size, c.intermediate_size, c.get(*self.act), c.get("mlp_bias", False))

    def make_mixture(self, c: Config) -> Mixture:
        """Experts without a gate, which may work in a narrower stream between two projections."""
        width, act, bias = c.hidden_size, c.get(*self.act), c.get("mlp_bias", False)
        choice = Choice(
            c.get("num_experts_per_tok", 2), "sigmoid", normed=c.get("norm_topk_prob", True),
            factor=c.get("routed_scaling_factor", 1.0), groups=c.get("n_group", 1), groups_each=c.get("topk_group", 1),
        )  # fmt: skip
        return Mixture(
            width, c.get("n_routed_experts", 8), c.get("moe_intermediate_size", 7688), act, choice,
            shared=MLP(width, c.get("moe_shared_expert_intermediate_size", 7688) or c.intermediate_size, act, bias),
            balanced=True, exact=True, gated=False, latent=c.get("moe_latent_size", 0), latent_bias=bias,
        )  # fmt: skip

    def make_rope(self, c: Config) -> None:
        return None


def kinds(c: Config) -> Sequence[str]:
    """The kind of each layer, from a list or from a text with one character per layer."""
    found = c.first("layers_block_type", "layer_types", "hybrid_override_pattern", default="ME*-")
    known = PATTERN if isinstance(found, str) else {kind: kind for kind in PATTERN.values()} | OLDER
    if strange := set(found) - set(known):
        raise InputError(f"layers of kind {', '.join(sorted(strange))} in the configuration are not supported")
    return [known[kind] for kind in found]
