"""MLPs: down(act(up(x))), and gated, down(act(gate(x)) · up(x)), with gate and up in one matrix.

The products of a long prompt on a GPU would need more memory than all else in a pass (2 GB for 36,000 tokens of an 8b).
So a gated MLP computes many tokens in slices, each long enough to keep the GPU busy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lamina import kernels
from lamina.activation import Gating, activation
from lamina.nn import onednn
from lamina.nn.linear import Linear, native_product
from lamina.weights.packed import Packed

LEAST_TOKENS = 4096  # of a slice: with fewer, products get slower
WHOLE_BYTES = 768 * 2**20  # products that take no more than this are computed in one piece
MOST_BYTES = 512 * 2**20  # that a slice's products may take, unless it would get too short


def slices(tokens: int, token_bytes: int) -> list[slice]:
    """Slices of about the same length, together `tokens`; token_bytes: what the products of one token take.

    >>> slices(12_000, 2**17)
    [slice(0, 4000, None), slice(4000, 8000, None), slice(8000, 12000, None)]
    >>> slices(8192, 2**15)
    [slice(0, 8192, None)]
    """
    if tokens * token_bytes <= WHOLE_BYTES:
        return [slice(0, tokens)]
    longest = max(LEAST_TOKENS, MOST_BYTES // token_bytes)
    length = -(-tokens // -(-tokens // longest)) if tokens else 1
    return [slice(start, min(start + length, tokens)) for start in range(0, tokens, length)]


class MLP(nn.Module):
    """factor: a fixed multiplier of the result"""

    def __init__(self, width: int, inner: int, act: str, bias: bool = False, *, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.up = Linear(width, inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        return self.down(self.up(x, act=self.act), onto, scale=self.factor)


class GatedMLP(nn.Module):
    """factors: fixed multipliers, of the gate before its activation and of the result"""

    def __init__(
        self,
        width: int,
        inner: int,
        act: str = "silu",
        bias: bool = False,
        *,
        factors: Sequence[float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        self.gate_factor, self.down_factor = factors
        self.gate_up = Linear(width, 2 * inner, bias=bias)
        self.down = Linear(inner, width, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x [..., width] -> [..., width]; `onto`: a residual that the result is added to."""
        if not kernels.on() and kernels.fuses(x):
            flat = x.flatten(0, -2)
            pieces = slices(len(flat), 3 * self.gate_up.out_features // 2 * x.element_size())
            if len(pieces) > 1:
                return self._in_slices(flat, onto, pieces).view(*x.shape[:-1], -1)
        return self.down(self.inner(x), onto, scale=self.down_factor)

    def _in_slices(self, x: Tensor, onto: Tensor | None, pieces: Sequence[slice]) -> Tensor:
        """The same for x [N, width], one slice of tokens after the other."""
        dtype = x.dtype if onto is None else torch.promote_types(onto.dtype, x.dtype)
        out = x.new_empty(x.shape, dtype=dtype)
        residual = None if onto is None else onto.reshape(len(x), -1)
        for piece in pieces:
            y = self.down(self.inner(x[piece]), scale=self.down_factor)
            if residual is None:
                out[piece] = y
            else:
                torch.add(residual[piece], y, out=out[piece])
        return out

    def inner(self, x: Tensor) -> Tensor:
        if kernels.on() and (y := self._by_kernel(x)) is not None:
            return y
        if (y := self._by_onednn(x)) is not None:
            return y
        gate_up = self.gate_up
        y = native_product(x, gate_up.weight, gate_up.bias, scale=self.gate_factor, act=self.act, gated=True)
        if y is not None:
            return y
        both = self.gate_up(x)
        if kernels.fuses(both) and (y := self._fused(both)) is not None:
            return y
        gate, up = both.chunk(2, dim=-1)
        return self.act(gate if self.gate_factor == 1 else gate * self.gate_factor) * up

    def _by_onednn(self, x: Tensor) -> Tensor | None:
        """Two products, the first with the activation, the second times the first; None if others are faster."""
        weight, bias = self.gate_up.weight, self.gate_up.bias
        act = onednn.act_of(self.act) if self.gate_factor == 1 else None
        if act is None or not onednn.fits(x, weight):
            return None
        (gate, up), (gate_bias, up_bias) = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
        return onednn.product_with(x, up, up_bias, onednn.product(x, gate, gate_bias, act), "mul")

    def _fused(self, both: Tensor) -> Tensor | None:
        """The activation of the product's first half times the second; None if no kernel computes it."""
        from lamina.kernels.elementwise import gated  # imports Triton
        from lamina.kernels.gemm.epilogue import kind_of

        if (kind := kind_of(self.act)) is None:
            return None
        return gated(both, Gating("gelu_new" if kind == "gelu_tanh" else kind), self.gate_factor)

    def _by_kernel(self, x: Tensor) -> Tensor | None:
        """Both products and the activation in one launch; None for an activation that no kernel computes, and for gate
        and up that are packed in different formats."""
        if (native := kernels.recorder()) is not None:
            return native.gated(self, x)
        from lamina.kernels.gemm.deferred_norm import operand  # imports Triton
        from lamina.kernels.gemm.epilogue import kind_of
        from lamina.kernels.gemm.product import gated_product

        if kind_of(self.act) is None:
            return None
        if isinstance(weight := self.gate_up.weight, Packed):
            from lamina.kernels.packed.linear import gated_step  # imports Triton

            return gated_step(x, weight, act=self.act, bias=self.gate_up.bias, scale=self.gate_factor)
        x, squares, eps = operand(x)
        y = gated_product(
            x.reshape(-1, x.shape[-1]), self.gate_up.weight, self.act, bias=self.gate_up.bias,
            scale=self.gate_factor, squares=squares, eps=eps,
        )  # fmt: skip
        return y.view(*x.shape[:-1], -1)
