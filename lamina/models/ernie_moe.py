"""ERNIE 4.5 with experts: softmax scores, a bias that takes part in the choice only, and shared experts.

https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf
"""

from __future__ import annotations

from torch import nn

from lamina.checkpoint.names import Either, From
from lamina.config import Config
from lamina.models.decoder import mlp_names
from lamina.models.glm import Ernie4_5
from lamina.nn import Choice, GatedMLP, Mixture
from lamina.nn.moe.names import expert_names

MLP = "model.layers.{i}.mlp"
BIAS = "moe_statics.e_score_correction_bias"


class Ernie4_5Moe(Ernie4_5):
    names = Ernie4_5.names | {
        "blocks.{i}.mlp.router.weight": f"{MLP}.gate.weight",
        "blocks.{i}.mlp.router.bias": Either(
            From(f"{MLP}.{BIAS}", lambda t: t.squeeze(0)), From(f"{MLP}.gate.{BIAS}", lambda t: t.squeeze(0))
        ),
        **expert_names("blocks.{i}.mlp.experts", f"{MLP}.experts"),
        **mlp_names("blocks.{i}.mlp.shared", f"{MLP}.shared_experts"),
    }
    aliases = Ernie4_5.aliases | {"lm_head_bias": "use_bias"}
    defaults = {"num_key_value_heads": 4}
    ignored = ("model.mtp_*",)  # multi-token prediction

    no_effect = ("moe_capacity", "num_nextn_predict_layers")  # of training

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        c.require("moe_gate", ("topk",), "topk")  # in published files; transformers reads neither
        c.require("moe_use_aux_free", (True,), True)
        first, last = c.get("moe_layer_start_index", 1), c.get("moe_layer_end_index", -1)
        last = c.num_hidden_layers - 1 if last == -1 else last
        if (layer + 1) % c.get("moe_layer_interval", 1) or not first <= layer <= last:
            return super().make_mlp(c, layer)
        width, inner, act = c.hidden_size, c.moe_intermediate_size, c.get(*self.act)
        choice = Choice(
            c.either("moe_k", "num_experts_per_tok", default=6), normed=True, least=c.get("moe_norm_min", 1e-12)
        )
        many = c.get("moe_num_shared_experts", 2)
        shared = GatedMLP(width, inner * many, act, c.get("use_bias", False)) if many else 0
        experts = c.either("moe_num_experts", "num_experts", default=64)
        return Mixture(width, experts, inner, act, choice, shared=shared, balanced=True, exact=True)
