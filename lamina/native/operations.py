"""The modules of `lamina.nn` in a native program: products, norms, embeddings and RoPE tables as native kernels.

`NativeRecorder` is the recorder that modules find by `kernels.recorder()` while a program is recorded. Activations are
float32 in a native program, whatever the dtype of the weights is: they are few, and weights are read once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.activation import ACTIVATIONS
from lamina.native.arguments import ACTS, EmbedArgs, GatedNormArgs, NormArgs, ProductArgs, RopeArgs, pointer
from lamina.native.recorder import Recorder
from lamina.native.weights import nbytes_of, segments_of, type_of

if TYPE_CHECKING:
    from lamina.nn.linear import Around, Linear
    from lamina.nn.mlp import GatedMLP
    from lamina.nn.moe.experts import Experts
    from lamina.nn.moe.router import Router
    from lamina.nn.norm import LayerNorm, RMSNorm
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm

NAMES = {name: name for name in ACTS if name}
NAMES |= {"swish": "silu", "gelu_python": "gelu"}
NAMES |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
BLOCK_BYTES = 1 << 16  # of a weight that a thread reads at once


class NativeRecorder(Recorder):
    def linear(self, module: Linear, x: Tensor, onto: Tensor | None, around: Around) -> Tensor:
        """`Linear.forward`"""
        before, scale, act, softcap = around
        kind = act_kind(act)
        if kind is None:  # PyTorch computes this activation, between two kernels
            return around.after_scale(self.linear(module, x, None, around._replace(act=None, softcap=None)), onto)
        if before != 1 and module.bias is not None:
            x, before = x * before, 1.0
        factor, each = (before, scale) if isinstance(scale, Tensor) else (before * scale, None)
        return self.product(
            x, module.weight, bias=module.bias, onto=onto, scale=factor, scales=each, act=kind, softcap=softcap
        )

    def gated(self, mlp: GatedMLP, x: Tensor) -> Tensor | None:
        """`GatedMLP.inner`; None for an activation that no kernel computes."""
        kind = act_kind(mlp.act)
        if kind is None:
            return None
        module = mlp.gate_up
        return self.product(x, module.weight, bias=module.bias, scale=mlp.gate_factor, act=kind, gated=True)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        onto: Tensor | None = None,
        scale: float = 1.0,
        scales: Tensor | None = None,
        act: int = 0,
        softcap: float | None = None,
        gated: bool = False,
    ) -> Tensor:
        """softcap(act((x Wᵀ + bias) · scale · scales)) + onto; gated: act(gate · scale) · up, gate and up stacked."""
        flat = rows_of(x)
        rows = flat.shape[0]
        outputs = weight.shape[0] // 2 if gated else weight.shape[0]
        out, residual = self.new(rows, outputs), None if onto is None else rows_of(onto).contiguous()
        wide = self.scratch(rows, 2 * outputs) if gated else None
        scales = None if scales is None else scales.float().contiguous()
        segments, kept = segments_of(self, weight, flat, out if wide is None else wide)
        row_bytes = nbytes_of(weight) // max(weight.shape[0], 1)
        block = max(4, min(BLOCK_BYTES // max(row_bytes, 1), -(-outputs // 8)) // 4 * 4)
        arguments = ProductArgs(
            segments=ctypes.addressof(segments), bias=pointer(bias), scales=pointer(scales),
            residual=pointer(residual), out=out.data_ptr(), wide=pointer(wide), count=len(segments), rows=rows,
            outputs=outputs, bias_type=0 if bias is None else type_of(bias), act=act, gated=gated, block=block,
            scale=scale, softcap=softcap or 0.0,
        )  # fmt: skip
        work = nbytes_of(weight)
        self.add("product", arguments, segments, kept, bias, scales, residual, out, wide, work=work)
        return out.view(*x.shape[:-1], outputs)

    def rms_norm(self, module: RMSNorm, x: Tensor, dtype: torch.dtype | None, onto: Tensor | None) -> Tensor:
        """`RMSNorm.forward`"""
        return self._norm(x, module.weight, None, module.eps, onto, centred=False, plus=float(module.plus_one))

    def layer_norm(self, module: LayerNorm, x: Tensor, dtype: torch.dtype | None, onto: Tensor | None) -> Tensor:
        """`LayerNorm.forward`"""
        weight: Tensor | None = module.weight
        bias: Tensor | None = module.bias
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            bias = bias.to(weight.dtype)
        return self._norm(x, weight, bias, module.eps, onto, centred=True, plus=0.0)

    def _norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, onto: Tensor | None, *,
        centred: bool, plus: float,
    ) -> Tensor:  # fmt: skip
        flat = rows_of(x)
        rows, width = flat.shape
        out, residual = self.new(rows, width), None if onto is None else rows_of(onto).contiguous()
        given = weight if weight is not None else bias
        arguments = NormArgs(
            x=flat.data_ptr(), weight=pointer(weight), bias=pointer(bias), residual=pointer(residual),
            out=out.data_ptr(), rows=rows, width=width, x_stride=flat.stride(0),
            weight_type=0 if given is None else type_of(given), centred=centred, eps=eps, plus=plus,
        )  # fmt: skip
        self.add("norm", arguments, flat, weight, bias, residual, out, work=2 * out.numel())
        return out.view(x.shape)

    def gated_norm(self, module: GatedRMSNorm, x: Tensor, gate: Tensor) -> Tensor:
        """`GatedRMSNorm.forward`"""
        flat, gates = rows_of(x), gate.float().reshape(-1, *gate.shape[-2:])
        gates = gates if gates.stride(-1) == 1 else gates.contiguous()
        out = self.new(*flat.shape)
        arguments = GatedNormArgs(
            x=flat.data_ptr(), gate=gates.data_ptr(), weight=module.weight.data_ptr(), out=out.data_ptr(),
            rows=flat.shape[0], width=flat.shape[1], x_stride=flat.stride(0), gate_outer=gates.stride(0),
            gate_stride=gates.stride(1), gate_inner=gates.shape[1], weight_type=type_of(module.weight),
            groups=module.groups, gate_first=module.gate_first, sigmoid=module.sigmoid, eps=module.eps,
        )  # fmt: skip
        self.add("gated_norm", arguments, flat, gates, module.weight, out, work=4 * out.numel())
        return out.view(gate.shape)

    def embed(self, weight: Tensor, ids: Tensor, scale: float, rounded: bool, onto: Tensor | None) -> Tensor:
        """`Embedding.forward`"""
        if rounded:
            scale = float(torch.tensor(scale, dtype=weight.dtype))
        flat, (vocab, width) = ids.reshape(-1).contiguous(), weight.shape
        out, residual = self.new(flat.shape[0], width), None if onto is None else rows_of(onto).contiguous()
        segments, kept = segments_of(self, weight, None, out)
        arguments = EmbedArgs(
            ids=flat.data_ptr(), weight=ctypes.addressof(segments), residual=pointer(residual), out=out.data_ptr(),
            rows=flat.shape[0], width=width, vocab=vocab, count=len(segments), scale=scale,
        )  # fmt: skip
        self.add("embed", arguments, flat, segments, kept, residual, out, work=2 * out.numel())
        return out.view(*ids.shape, width)

    def route(self, router: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`Router.forward`"""
        from lamina.native.mixture import route  # which imports this module

        return route(self, router, x)

    def experts(
        self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor, onto: Tensor | None = None
    ) -> Tensor:
        """`Experts.forward`, plus a residual."""
        from lamina.native.mixture import experts_sum  # which imports this module

        return experts_sum(self, experts, x, chosen, weights, onto)

    def rotary_table(self, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """`Rotary.forward`"""
        flat, frequencies = positions.reshape(-1).contiguous(), frequencies.float().contiguous()
        pairs = frequencies.shape[0]
        cos, sin = (self.new(*positions.shape, pairs) for _ in range(2))
        arguments = RopeArgs(
            positions=flat.data_ptr(), frequencies=frequencies.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
            rows=flat.shape[0], pairs=pairs, scale=scale,
        )  # fmt: skip
        self.add("rope", arguments, flat, frequencies, cos, sin, work=8 * cos.numel())
        return cos, sin


def act_kind(act: str | Callable[[Tensor], Tensor] | None) -> int | None:
    """The number of an activation; 0 for none, None for one that no kernel computes."""
    if act is None:
        return 0
    name = act if isinstance(act, str) else next((name for name, f in ACTIVATIONS.items() if f is act), "")
    return ACTS[NAMES[name]] if name in NAMES else None


def rows_of(x: Tensor) -> Tensor:
    """x as float32 [N, width], values of a row next to each other; rows may have gaps."""
    flat = x.float().reshape(-1, x.shape[-1])
    return (
        flat if flat.stride(1) == 1 and (flat.shape[0] == 1 or flat.stride(0) >= flat.shape[1]) else flat.contiguous()
    )
