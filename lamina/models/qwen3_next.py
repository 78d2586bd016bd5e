"""Qwen3-Next: three layers of the gated delta rule to one of gated attention, each followed by a mixture of experts.

A token visits its best experts and one shared expert behind a gate of its own.

https://qwen.ai/blog?id=qwen3-next
"""

from __future__ import annotations

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import From, Names, Stack
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.decoder import Decoder
from lamina.nn import Choice, GatedDeltaMixer, GatedMLP, Mixture, RMSNorm, Rotary, SelfAttention, rope_parameters
from lamina.nn.attention.rotary import RopeTable
from lamina.nn.recurrent.gated_delta import regroup_by_part


def mixture(c: Config) -> Mixture:
    """The best experts by a softmax over all; the gate of the shared one is a row of the router's matrix."""
    return Mixture(
        c.hidden_size, c.num_experts, c.moe_intermediate_size, c.get("hidden_act", "silu"),
        Choice(c.num_experts_per_tok, "softmax", normed=c.get("norm_topk_prob", True)),
        shared=c.shared_expert_intermediate_size, opens=True,
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, c: Config, kind: str, dense: bool) -> None:
        super().__init__()
        width, eps, act = c.hidden_size, c.rms_norm_eps, c.get("hidden_act", "silu")
        self.attends = kind == "full_attention"
        self.specs: LayerSpecs
        if self.attends:
            bias, head_dim = c.get("attention_bias", False), c.head_dim
            self.attention = SelfAttention(
                width, c.num_attention_heads, c.num_key_value_heads, head_dim, bias=bias, out_bias=bias, gated=True,
                q_norm=RMSNorm(head_dim, eps, plus_one=True), k_norm=RMSNorm(head_dim, eps, plus_one=True),
            )  # fmt: skip
            self.specs = {"attention": self.attention.spec}
        else:
            self.delta = GatedDeltaMixer(
                width, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim,
                c.linear_value_head_dim, c.linear_conv_kernel_dim, eps=eps, act=act,
            )  # fmt: skip
            self.specs = self.delta.specs
        self.mixer_norm = RMSNorm(width, eps, plus_one=True)
        self.mlp_norm = RMSNorm(width, eps, plus_one=True)
        self.mlp = GatedMLP(width, c.intermediate_size, act) if dense else mixture(c)

    def forward(self, x: Tensor, memory: Memory, rope: RopeTable) -> Tensor:
        y = self.mixer_norm(x)
        x = self.attention(y, memory, rope, onto=x) if self.attends else self.delta(y, memory, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


def layer_kinds(c: Config) -> list[str]:
    """linear_attention or full_attention, for each layer."""
    count, interval = c.num_hidden_layers, c.get("full_attention_interval", 4)
    chosen = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    kinds = c.get("layer_types", chosen)
    if len(kinds) != count or not set(kinds) <= {"linear_attention", "full_attention"}:
        raise InputError(f"layer_types={kinds} must say linear_attention or full_attention for each of {count} layers")
    return kinds


def is_dense(c: Config, layer: int) -> bool:
    """Whether a layer has one MLP in place of experts."""
    sparse = c.num_experts > 0 and (layer + 1) % c.get("decoder_sparse_step", 1) == 0
    return not sparse or layer in c.get("mlp_only_layers", ())


def tensor_names(c: Config) -> Names:
    """Stored queries lie beside their gates, head by head, and q, k, v, z likewise by key head: here they are apart."""
    shared = c.linear_num_value_heads // c.linear_num_key_heads  # value heads of a key head
    key, value = c.linear_key_head_dim, shared * c.linear_value_head_dim
    queries_gates = regroup_by_part(c.num_attention_heads, c.head_dim, c.head_dim)
    layer = "model.layers.{i}"
    return {
        "embedding": "model.embed_tokens",
        "blocks.{i}.mixer_norm": f"{layer}.input_layernorm",
        "blocks.{i}.attention.qkv": (
            From(f"{layer}.self_attn.q_proj", queries_gates),
            f"{layer}.self_attn.k_proj",
            f"{layer}.self_attn.v_proj",
        ),
        "blocks.{i}.attention.q_norm": f"{layer}.self_attn.q_norm",
        "blocks.{i}.attention.k_norm": f"{layer}.self_attn.k_norm",
        "blocks.{i}.attention.out": f"{layer}.self_attn.o_proj",
        "blocks.{i}.delta.project": (
            From(f"{layer}.linear_attn.in_proj_qkvz", regroup_by_part(c.linear_num_key_heads, key, key, value, value)),
            From(f"{layer}.linear_attn.in_proj_ba", regroup_by_part(c.linear_num_key_heads, shared, shared)),
        ),
        "blocks.{i}.delta.conv.weight": From(f"{layer}.linear_attn.conv1d.weight", lambda t: t.squeeze(1)),
        "blocks.{i}.delta.A": From(f"{layer}.linear_attn.A_log", lambda t: -t.float().exp()),
        "blocks.{i}.delta.dt_bias": f"{layer}.linear_attn.dt_bias",
        "blocks.{i}.delta.norm": f"{layer}.linear_attn.norm",
        "blocks.{i}.delta.out": f"{layer}.linear_attn.out_proj",
        "blocks.{i}.mlp_norm": f"{layer}.post_attention_layernorm",
        "blocks.{i}.mlp.gate_up": (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
        "blocks.{i}.mlp.down": f"{layer}.mlp.down_proj",
        "blocks.{i}.mlp.router": (f"{layer}.mlp.gate", f"{layer}.mlp.shared_expert_gate"),
        "blocks.{i}.mlp.experts.gate_up": Stack(
            (f"{layer}.mlp.experts.{{e}}.gate_proj.weight", f"{layer}.mlp.experts.{{e}}.up_proj.weight")
        ),
        "blocks.{i}.mlp.experts.down": Stack(f"{layer}.mlp.experts.{{e}}.down_proj.weight"),
        "blocks.{i}.mlp.shared.gate_up": (f"{layer}.mlp.shared_expert.gate_proj", f"{layer}.mlp.shared_expert.up_proj"),
        "blocks.{i}.mlp.shared.down": f"{layer}.mlp.shared_expert.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }


class Qwen3Next(Decoder):
    ignored = ("mtp.*",)  # guesses the tokens after the next

    def __init__(self, c: Config) -> None:
        settings = rope_parameters(c.with_values(partial_rotary_factor=c.get("partial_rotary_factor", 0.25)))
        turned = int(c.head_dim * settings["partial_rotary_factor"])
        super().__init__(
            c,
            (Block(c, kind, is_dense(c, i)) for i, kind in enumerate(layer_kinds(c))),
            RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True),
            rope=Rotary(turned, settings, c.get("max_position_embeddings")),
            tied=c.get("tie_word_embeddings", False),
        )
        self.names = tensor_names(c)
