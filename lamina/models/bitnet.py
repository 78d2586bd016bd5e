"""BitNet b1.58: Llama with a further norm before the last product of attention and of the MLP.

Weights of a checkpoint that says how it is quantized are -1, 0 or 1 times a factor. They are packed four to a byte, or
rounded at load. Inputs of products are then rounded to 8 bits per token, as in training.

https://arxiv.org/abs/2504.12285
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint.names import From, Part, Value
from lamina.config import Config
from lamina.models.transformer import Transformer
from lamina.nn import Block, GatedMLP, Linear, RMSNorm, SelfAttention


class RoundingNorm(RMSNorm):
    """RMS norm whose result is rounded to multiples of 1/127 of the largest value of its vector."""

    def forward(self, x: Tensor, dtype: torch.dtype | None = None, onto: Tensor | None = None) -> Tensor:
        y = super().forward(x, dtype, onto)
        exact = y.to(torch.promote_types(y.dtype, torch.float32))
        scale = 127 / exact.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5)
        return ((exact * scale).round().clamp(-128, 127) / scale).to(y.dtype)


class NormedLinear(nn.Module):
    """onto + scale · W norm(x)"""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor, onto: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return self.linear(self.norm(x), onto, scale=scale)


class BitNet(Transformer):
    names = Transformer.names | {
        "blocks.{i}.attention.out.norm": "model.layers.{i}.self_attn.attn_sub_norm",
        "blocks.{i}.attention.out.linear": "model.layers.{i}.self_attn.o_proj",
        "blocks.{i}.mlp.down.norm": "model.layers.{i}.mlp.ffn_sub_norm",
        "blocks.{i}.mlp.down.linear": "model.layers.{i}.mlp.down_proj",
    }
    quantized = ("bitnet",)
    eps = ("rms_norm_eps", 1e-5)
    act = ("hidden_act", "relu2")
    rope_base = 500_000.0

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        if is_quantized(c):
            self.names = {**self.names, **quantized_names(c.part("quantization_config"))}

    def make_block(self, c: Config, layer: int) -> Block:
        norms = dict(attention_norm=self.input_norm(c, c.hidden_size), mlp_norm=self.input_norm(c, c.hidden_size))
        return Block(self.make_attention(c, layer), self.make_mlp(c, layer), **norms)

    def make_attention(self, c: Config, layer: int, **options: Any) -> SelfAttention:
        attention = super().make_attention(c, layer, **options)
        norm = self.input_norm(c, attention.out.in_features)
        attention.out = NormedLinear(norm, attention.out)  # type: ignore[assignment]
        return attention

    def make_mlp(self, c: Config, layer: int) -> GatedMLP:
        mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.get(*self.act))
        mlp.down = NormedLinear(self.input_norm(c, c.intermediate_size), mlp.down)  # type: ignore[assignment]
        return mlp

    def input_norm(self, c: Config, width: int) -> RMSNorm:
        """A norm whose result only products read."""
        return (RoundingNorm if is_quantized(c) else RMSNorm)(width, c.get(*self.eps))


def is_quantized(c: Config) -> bool:
    return c.get("quantization_config", {}).get("quant_method") == "bitnet"


def quantized_names(how: Config) -> dict[str, Value]:
    """Names of ternary weights, by the settings in `quantization_config`."""
    how.require("modules_to_not_convert", (None, ["lm_head"]))
    how.require("use_rms_norm", (False,), False)
    how.ignore("quant_method", "rms_norm_eps")
    kind = how.require("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = how.require("quantization_mode", ("offline", "online"), "offline")

    def ternary(name: str) -> Part:
        weight = f"model.layers.{{i}}.{name}_proj.weight"
        if kind == "autobitlinear" and mode == "online":
            return From(weight, rounded_weight)
        return From((weight, f"{weight}_scale"), multiplied if kind == "autobitlinear" else divided)

    return {
        "blocks.{i}.attention.qkv.weight": tuple(ternary(f"self_attn.{part}") for part in "qkv"),
        "blocks.{i}.attention.out.linear.weight": ternary("self_attn.o"),
        "blocks.{i}.mlp.gate_up.weight": (ternary("mlp.gate"), ternary("mlp.up")),
        "blocks.{i}.mlp.down.linear.weight": ternary("mlp.down"),
    }


def unpacked(packed: Tensor) -> Tensor:
    """[out / 4, in] -> [out, in] of -1, 0 and 1: the lowest two bits have the first quarter of the rows, plus one"""
    shifts = torch.arange(0, 8, 2, device=packed.device, dtype=torch.uint8)[:, None, None]
    return (packed.to(torch.uint8) >> shifts & 3).flatten(0, 1).float() - 1


def multiplied(packed: Tensor, scale: Tensor) -> Tensor:
    return unpacked(packed) * scale.float()


def divided(packed: Tensor, scale: Tensor) -> Tensor:
    return unpacked(packed) / scale.float()


def rounded_weight(weight: Tensor) -> Tensor:
    """The nearest of -s, 0 and s, where s is the mean of absolute values."""
    exact = weight.float()
    scale = exact.abs().mean().clamp(min=1e-5)
    return ((exact / scale).round().clamp(-1, 1) * scale).to(weight.dtype)
