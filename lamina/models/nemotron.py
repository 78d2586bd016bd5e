"""Nemotron and Jais 2: Llama with LayerNorm and an MLP of squared relus; the norms of Nemotron are stored minus one.

https://arxiv.org/abs/2402.16819  https://huggingface.co/inceptionai/Jais-2-8B-Chat
"""

from __future__ import annotations

from lamina.checkpoint.names import From
from lamina.models.gpt import Gpt

NORMS = {
    "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
}


class Jais2(Gpt):
    eps = ("layer_norm_eps", 1e-5)
    act = ("hidden_act", "relu2")
    defaults = {"intermediate_size": 26_624}
    tied = False


class Nemotron(Gpt):
    no_effect = ("kv_channels",)  # `head_dim` again
    names = Gpt.names | {path: From(name, lambda t: t + 1) for path, name in NORMS.items()}
    defaults = {"attention_bias": False, "mlp_bias": False, "intermediate_size": 24_576}
    eps = ("norm_eps", 1e-5)
    act = ("hidden_act", "relu2")
    tied = False
    rope_partial = 0.5
