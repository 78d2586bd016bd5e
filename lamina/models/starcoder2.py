"""StarCoder 2: Llama with LayerNorm, a plain MLP, biases and a sliding window.

https://arxiv.org/abs/2402.19173
"""

from __future__ import annotations

from lamina.attention.window import Full, Sliding, Window
from lamina.config import Config
from lamina.models.gpt import Gpt


class Starcoder2(Gpt):
    names = Gpt.names | {
        "blocks.{i}.mlp.up": "model.layers.{i}.mlp.c_fc",
        "blocks.{i}.mlp.down": "model.layers.{i}.mlp.c_proj",
    }
    aliases = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
    defaults = {"num_key_value_heads": 2, "intermediate_size": 12_288}
    eps = ("norm_epsilon", 1e-5)
    act = ("hidden_act", "gelu_pytorch_tanh")

    def __init__(self, c: Config) -> None:
        c.require("mlp_type", ("default",), "default")  # in published files; transformers reads neither
        c.require("norm_type", ("layer_norm",), "layer_norm")
        c.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
        c.ignore("activation_function", "layer_norm_epsilon")  # older names, beside the newer
        super().__init__(c)

    def make_window(self, c: Config, layer: int) -> Window:
        size = c.get("sliding_window")
        return Full() if size is None else Sliding(size)
