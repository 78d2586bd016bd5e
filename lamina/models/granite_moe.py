"""Granite with experts, and with one more expert that all tokens share.

https://www.ibm.com/granite
"""

from __future__ import annotations

from torch import nn

from lamina.checkpoint.names import Either
from lamina.config import Config
from lamina.models.granite import Granite
from lamina.nn import Choice, Mixture
from lamina.nn.moe.names import linear_stack_names

LAYER = "model.layers.{i}"
ROUTER = Either(f"{LAYER}.block_sparse_moe.router.layer", f"{LAYER}.block_sparse_moe.router")
"""In published files, and as transformers 5 holds it."""


class GraniteMoe(Granite):
    names = Granite.names | {
        "blocks.{i}.mlp.router": ROUTER,
        **linear_stack_names("blocks.{i}.mlp.experts", f"{LAYER}.block_sparse_moe"),
        "blocks.{i}.mlp.shared.gate_up": f"{LAYER}.shared_mlp.input_linear",
        "blocks.{i}.mlp.shared.down": f"{LAYER}.shared_mlp.output_linear",
    }

    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return self.make_mixture(c, shared=0)

    def make_mixture(self, c: Config, shared: int) -> Mixture:
        choice = Choice(c.get("num_experts_per_tok", 2), normed=True)
        experts, inner, factor = c.get("num_local_experts", 8), c.intermediate_size, c.residual_multiplier
        return Mixture(c.hidden_size, experts, inner, c.get(*self.act), choice, shared=shared, factor=factor)


class GraniteMoeShared(GraniteMoe):
    def make_mlp(self, c: Config, layer: int) -> nn.Module:
        return self.make_mixture(c, c.get("shared_intermediate_size", 0))
