"""Switch Transformers: T5 with a mixture of experts in some layers, one expert per token.

An expert takes a limited number of tokens of a row; tokens after those skip the MLP. Layers count the tokens of a row
that each expert has had, so that a row in many passes is the row in one pass.

https://arxiv.org/abs/2101.03961
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lamina.cache.memory import Memory
from lamina.cache.spec import Recurrent
from lamina.checkpoint.names import Value, renamed
from lamina.config import Config
from lamina.errors import InputError
from lamina.models.t5 import T5, T5Block, T5EncoderBlock, bounded
from lamina.nn import MLP, Choice, Mixture
from lamina.nn.moe.names import expert_names
from lamina.recurrence import RGLRU


class SwitchEncoderBlock(T5EncoderBlock):
    def __init__(self, c: Config, family: type[T5], layer: int) -> None:
        super().__init__(c, family, layer)
        self.rule = RGLRU(c.num_experts)  # with a log decay of 0: a running sum
        if isinstance(self.mlp, Mixture):
            self.specs = {**self.specs, "experts": Recurrent(self.rule)}

    def feed_forward(self, x: Tensor, memory: Memory) -> Tensor:
        if not isinstance(self.mlp, Mixture):
            return super().feed_forward(x, memory)

        def count(tokens: Tensor) -> Tensor:
            """[B, T, E] ones where a token goes to an expert -> how many each expert has had by then"""
            return memory.recur(self.rule, {"x": tokens, "g": torch.zeros_like(tokens)}, {}, name="experts")

        return bounded(x + self.mlp(self.mlp_norm(x), count=count))


class SwitchBlock(SwitchEncoderBlock, T5Block):
    """With cross-attention."""


def with_mlp_names(names: dict[str, Value]) -> dict[str, Value]:
    """The names of T5 with those of the dense and sparse MLPs."""
    found = renamed(names, lambda name: name.replace("DenseReluDense", "mlp"))
    for side, theirs in (("encoder.", "encoder.block.{i}.layer.1.mlp"), ("", "decoder.block.{i}.layer.2.mlp")):
        ours = f"{side}blocks.{{i}}.mlp"
        found |= expert_names(f"{ours}.experts", f"{theirs}.experts", parts=("wi", "wo"), expert="expert_{e}")
        found[f"{ours}.router.weight"] = f"{theirs}.router.classifier.weight"
        found[f"{ours}.router.logit_bias"] = f"{theirs}.router.classifier.bias"
    return found


class SwitchTransformers(T5):
    names = with_mlp_names(dict(T5.names))
    encoder_block, block = SwitchEncoderBlock, SwitchBlock

    def __init__(self, c: Config) -> None:
        c.require("router_dtype", ["float32"], "float32")
        c.require("num_selected_experts", [1], 1)  # in published files; transformers reads none of these
        c.require("batch_prioritized_routing", [False], False)
        c.require("router_type", ["tokens_masked"], "tokens_masked")
        c.ignore("feed_forward_proj", "is_gated_act", "router_ignore_padding_tokens", "add_router_probs")
        super().__init__(c.with_defaults({"num_decoder_layers": 12}))

    @classmethod
    def make_mlp(cls, c: Config, layer: int, decoder: bool) -> nn.Module:
        act = c.get("dense_act_fn", "relu")
        if not is_sparse(c, layer, "decoder" if decoder else "encoder"):
            return MLP(c.d_model, c.d_ff, act)
        if (capacity := c.get("expert_capacity", 64)) < 1:
            raise InputError(f"expert_capacity={capacity} in the configuration must be at least 1")
        bias = c.get("router_bias", False)
        return Mixture(
            c.d_model, c.num_experts, c.d_ff, act, Choice(each=1), gated=False, exact=True, logit_bias=bias,
            capacity=capacity,
        )  # fmt: skip

    def scales(self, c: Config) -> bool:
        return c.get("tie_word_embeddings", True)


def is_sparse(c: Config, layer: int, side: str) -> bool:
    """Every n-th layer has experts, from the second on. The step is a field of its own in files that transformers
    wrote; without sparse layers it is the number of layers, so that there is one."""
    layers = c.get("num_decoder_layers", c.num_layers) if side == "decoder" else c.num_layers
    sparse = c.get(f"num_sparse_{side}_layers", 3)
    step = c.get(f"{side}_sparse_step", layers // sparse if sparse else layers)
    return step == 1 or (step > 1 and layer % step == 1)
