"""The first GPT: GPT-2 with norms after the residuals, and none at the end.

https://openai.com/index/language-unsupervised
"""

from __future__ import annotations

from torch import nn

from lamina.checkpoint.names import renamed
from lamina.config import Config
from lamina.models.gpt2 import GPT2
from lamina.nn import PostNormBlock


class OpenAIGPT(GPT2):
    names = renamed(GPT2.names, lambda name: name.replace("wte", "tokens_embed").replace("wpe", "positions_embed"))
    ignored = (*GPT2.ignored, "*position_ids")

    def __init__(self, c: Config) -> None:
        act = {"gelu": "gelu_new"}.get(name := c.require("afn", ("gelu", "relu", "silu", "swish"), "gelu"), name)
        c.ignore("n_special", "predict_special_tokens")  # of files from before 2020; no code reads them
        c.require("scale_attn_weights", (True,), True)
        c.require("scale_attn_by_inverse_layer_idx", (False,), False)
        super().__init__(c.with_values(activation_function=act, intermediate_size=4 * c.hidden_size))
        self.norm = nn.Identity()  # type: ignore[assignment]

    def make_block(self, c: Config, layer: int) -> nn.Module:
        attention, mlp = self.make_attention(c, layer), self.make_mlp(c, layer)
        return PostNormBlock(attention, mlp, attention_norm=self.make_norm(c), mlp_norm=self.make_norm(c))
