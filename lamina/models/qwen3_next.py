"""Qwen3-Next: three layers of the gated delta rule for each layer of gated attention, each with a mixture of experts.

A token uses its best routed experts and one shared expert with a gate.

https://qwen.ai/blog?id=qwen3-next
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import LayerSpecs
from lamina.checkpoint.names import From, Names
from lamina.config import Config
from lamina.models.decoder import Decoder, layer_types
from lamina.models.qwen_moe import is_dense
from lamina.nn import Choice, GatedDeltaMixer, GatedMLP, Mixture, Positions, RMSNorm, Rotary, SelfAttention
from lamina.nn.moe.names import expert_names
from lamina.nn.recurrent.gated_delta import regroup_by_part


def mixture(c: Config) -> Mixture:
    """Scores are a softmax over all experts; the gate of the shared expert is one more row of the router's matrix."""
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

    def forward(self, x: Tensor, memory: Memory, shared: Positions) -> Tensor:
        y = self.mixer_norm(x)
        x = self.attention(y, memory, shared, onto=x) if self.attends else self.delta(y, memory, onto=x)
        return self.mlp(self.mlp_norm(x), onto=x)


def layer_kinds(c: Config) -> Sequence[str]:
    """The kind of each layer: linear_attention or full_attention."""
    interval = c.get("full_attention_interval", 4)
    known = ["linear_attention", "full_attention"]
    return layer_types(c, known, lambda i: known[(i + 1) % interval == 0])


def tensor_names(c: Config) -> Names:
    """Parameter names. Checkpoints interleave queries and gates by head, and q, k, v, z (and b, a) by key head; here
    each of them is contiguous."""
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
        **expert_names("blocks.{i}.mlp.experts", f"{layer}.mlp.experts"),
        "blocks.{i}.mlp.shared.gate_up": (f"{layer}.mlp.shared_expert.gate_proj", f"{layer}.mlp.shared_expert.up_proj"),
        "blocks.{i}.mlp.shared.down": f"{layer}.mlp.shared_expert.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }


class Qwen3Next(Decoder):
    no_effect = ("intermediate_size", "mlp_only_layers", "sliding_window", "max_window_layers")
    ignored = ("mtp.*",)  # multi-token prediction layers

    def __init__(self, c: Config) -> None:
        c.require("attn_output_gate", (True,), True)  # in published files; transformers reads neither
        c.require("use_sliding_window", (False,), False)
        super().__init__(
            c,
            (Block(c, kind, is_dense(c, i)) for i, kind in enumerate(layer_kinds(c))),
            RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True),
            rope=Rotary.of(c, c.head_dim, partial=0.25, more=("mrope_section", "mrope_interleaved")),
            tied=c.get("tie_word_embeddings", False),
        )
        self.names = tensor_names(c)
