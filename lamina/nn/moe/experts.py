"""The experts of a mixture: many MLPs, of which each token uses a few.

A router chooses experts and their weights for each token (`router.py`); `Experts` runs them. The same weighted sum is
computed in three ways. `by_expert` groups the tokens by expert, so the matrices of each chosen expert are read once and
those of others never. `gathered` copies the matrices that a few tokens need. `all_experts` runs all experts over all
tokens: the definition, and the way to run many tokens if no shape may depend on the choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lamina import kernels
from lamina.activation import Gating, activation
from lamina.errors import InputError
from lamina.kernels.packed.serve import stack_of, why_unread
from lamina.nn.initial import random_weight
from lamina.tracing import portable, surely
from lamina.weights.packed import Packed
from lamina.weights.product import packed_linear

MOST_UNPACKED = 3 << 29  # bytes of a packed stack that is dequantized whole for a prompt
LEAST_UNPACKED = 16  # tokens for which that is done: fewer may visit a few experts


class Experts(nn.Module):
    """down(act(gate(x)) · up(x)) for each expert, as stacked matrices: `gate_up` [E, 2 · inner, width] and `down`
    [E, width, inner].

    act           the name of an activation, or a `Gating`
    gated         False: down(act(up(x))), with `up` [E, inner, width] instead of `gate_up`
    bias          True: `gate_up_bias` [E, 2 · inner] (or `up_bias` [E, inner]) and `down_bias` [E, width]
    identity      how many experts have no matrices and return their input; their indices follow those of the others
    weigh_input   True: a router weight multiplies the expert's input instead of its output

    The stacks are parameters, or `Packed`: then the chosen experts alone are dequantized.

    >>> experts = Experts(8, width=4, inner=6)
    >>> chosen, weights = torch.tensor([[[0, 5], [2, 3]]]), torch.full((1, 2, 2), 0.5)
    >>> experts(torch.randn(1, 2, 4), chosen, weights).shape
    torch.Size([1, 2, 4])
    """

    packable = ("gate_up", "up", "down")

    def __init__(
        self,
        experts: int,
        width: int,
        inner: int,
        act: str | Gating = "silu",
        *,
        gated: bool = True,
        bias: bool = False,
        identity: int = 0,
        weigh_input: bool = False,
    ) -> None:
        super().__init__()
        if weigh_input and (bias or identity):
            raise InputError("weigh_input=True is not supported together with bias or identity")
        if not gated and isinstance(act, Gating):
            raise InputError(f"ungated experts take the name of an activation, not {act}")
        self.gating = act if isinstance(act, Gating) else Gating(act)
        self.act = activation(self.gating.act)
        self.gated, self.identity, self.weigh_input = gated, identity, weigh_input
        rows, name = inner * (1 + gated), "gate_up" if gated else "up"
        self.register_parameter(name, random_weight(experts, rows, width))
        self.down = random_weight(experts, width, inner)
        self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(experts, rows)) if bias else None)
        self.down_bias = nn.Parameter(torch.zeros(experts, width)) if bias else None

    @property
    def first(self) -> Tensor:
        """The stack of matrices that x is multiplied by: `gate_up` or `up`."""
        found: Tensor = getattr(self, "gate_up" if self.gated else "up")
        return found

    @property
    def packed(self) -> bool:
        return isinstance(self.first, Packed) or isinstance(self.down, Packed)

    @property
    def first_bias(self) -> Tensor | None:
        return self._parameters["gate_up_bias" if self.gated else "up_bias"]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [..., W], chosen and weights [..., K] -> [..., W]: the weighted sum of each token's K experts."""
        if (native := kernels.recorder()) is not None:
            return native.experts(self, x, chosen, weights)
        if kernels.on():
            return self.by_kernel(x, chosen, weights)
        tokens, chosen, weights = x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2)
        few = surely(3 * chosen.numel() <= self.down.shape[0])  # gathering reads, writes and reads again
        grouped = self._grouped_products(tokens)
        if self.packed or (tokens.device.type == "cpu" and not torch.compiler.is_compiling()):
            way = self.by_expert
        elif few and (tokens.shape[0] == 1 or not grouped):
            way = self.gathered
        else:
            way = self.by_expert if grouped else self.all_experts
        out = way(tokens, chosen, weights)
        return out.to(x.dtype).view(x.shape)

    def by_kernel(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        shared: tuple[Tensor, Tensor] | None = None,
        opening: Tensor | None = None,
        onto: Tensor | None = None,
        *,
        shared_factor: float = 1.0,
    ) -> Tensor:
        """The same in two kernel launches, for few tokens, plus onto + shared_factor · opening · shared(x).

        shared    gate_up [2S, W], or up [S, W] if the experts are not gated, and down [W, S] of the shared expert
        opening   [..., 1] gate of the shared expert
        onto      [..., W] residual
        """
        from lamina.kernels.gemm.deferred_norm import deferred_norm, made, operand  # imports Triton
        from lamina.kernels.gemm.epilogue import kind_of
        from lamina.kernels.gemm.experts import expert_down, expert_gated

        flat_choice, flat_weights = chosen.flatten(0, -2), weights.flatten(0, -2)
        if kind_of(self.act) is None:
            if self.packed:
                raise InputError("packed experts with an activation that no kernel computes are not captured")
            assert shared is None
            out = self.gathered(x.flatten(0, -2), flat_choice, flat_weights).to(x.dtype).view(x.shape)
            return out if onto is None else onto + out
        if self.packed:
            assert shared is None
            return self._by_packed_kernel(x, flat_choice, flat_weights, onto)
        x, squares, eps = operand(x)
        tokens = x.flatten(0, -2)
        shared_first, shared_down = (None, None) if shared is None else shared
        h = expert_gated(
            tokens, self.first, flat_choice, flat_weights, self.gating, gated=self.gated, bias=self.first_bias,
            identity=self.identity > 0, weigh_input=self.weigh_input, shared=shared_first, shared_factor=shared_factor,
            opening=opening, squares=squares, eps=eps,
        )  # fmt: skip
        residual = None if onto is None else onto.flatten(0, -2)
        deferred = deferred_norm(self, x, x.shape[-1])
        y = expert_down(
            h, self.down, flat_choice, flat_weights, bias=self.down_bias, identity=tokens if self.identity else None,
            squares=squares, eps=eps, shared=shared_down, residual=residual, next_norm=deferred,
        )  # fmt: skip
        read = self.down.nbytes // len(self.down) * chosen.shape[-1]
        return made(self, y.view(x.shape), deferred, read)

    def _by_packed_kernel(self, x: Tensor, chosen: Tensor, weights: Tensor, onto: Tensor | None) -> Tensor:
        """The same for packed matrices; a shared expert has launches of its own."""
        from lamina.kernels.gemm.deferred_norm import deferred_norm, made, operand  # imports Triton
        from lamina.kernels.packed.experts import packed_expert_down, packed_expert_gated

        x, squares, eps = operand(x)
        tokens, first, down = x.flatten(0, -2), self.first, self.down
        assert isinstance(first, Packed) and isinstance(down, Packed)
        experts = down.shape[0]
        h = packed_expert_gated(
            tokens, stack_of(first), chosen, weights, self.gating, experts=experts, gated=self.gated,
            bias=self.first_bias, identity=self.identity > 0, weigh_input=self.weigh_input, squares=squares, eps=eps,
        )  # fmt: skip
        deferred = deferred_norm(self, x, x.shape[-1])
        y = packed_expert_down(
            h, stack_of(down), chosen, weights, experts=experts, bias=self.down_bias,
            identity=tokens if self.identity else None, squares=squares, eps=eps,
            residual=None if onto is None else onto.flatten(0, -2), next_norm=deferred,
        )  # fmt: skip
        return made(self, y.view(x.shape), deferred, down.nbytes // experts * chosen.shape[-1])

    @property
    def plain_gating(self) -> bool:
        """True if the experts are gated by the activation alone, as `GatedMLP` is."""
        return self.gating == Gating(self.gating.act)

    def by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: (token, expert) pairs sorted by expert."""
        narrow = torch.uint8 if self.down.shape[0] + self.identity <= 256 else torch.int32  # fewer digits to sort by
        order = chosen.flatten().to(narrow).argsort(stable=True)  # [P]
        sizes = torch.zeros(self.down.shape[0] + self.identity, dtype=torch.int32, device=x.device)
        sizes.scatter_add_(0, chosen.flatten(), torch.ones_like(order, dtype=torch.int32))
        sizes = sizes[: self.down.shape[0]]
        grouped = self._grouped_products(x)
        if x.is_meta and self.packed and not grouped:  # a pass is planned: as if all pairs had one expert
            groups: Tensor | list[int] = [len(order), *(0 for _ in sizes[1:])]
        else:
            groups = sizes.cumsum(0, dtype=torch.int32) if grouped else sizes.tolist()
        pairs = x[order // chosen.shape[1]]
        if self.weigh_input:
            pairs = (pairs * weights.flatten()[order, None]).to(x.dtype)
        experts = chosen.flatten()[order].clamp(max=self.down.shape[0] - 1)
        h = self._inner(_products(pairs, self.first, groups), experts)
        sorted_out = self._biased(_products(h, self.down, groups), self.down_bias, experts)
        if kernels.fuses(x):
            return self._fused_sum(x, sorted_out, order, chosen, weights)
        out = torch.empty_like(sorted_out).index_copy(0, order, sorted_out)
        return self._sum(out.view(*chosen.shape, -1), x, chosen, weights)

    def _fused_sum(self, x: Tensor, sorted_out: Tensor, order: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        from lamina.kernels.elementwise import expert_sum  # imports Triton

        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        places = places.view(chosen.shape)
        if self.identity:
            places = torch.where(chosen < self.down.shape[0], places, len(order))
        return expert_sum(x, sorted_out, places, None if self.weigh_input else weights.contiguous())

    def gathered(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: with a copy of the matrices of each token's experts."""
        inputs = self._weighed_in(x, weights)[..., None]  # [N, K, W, 1]
        experts = chosen.clamp(max=self.down.shape[0] - 1) if self.identity else chosen
        first = F.embedding(experts, self.first.flatten(1)).unflatten(-1, (-1, x.shape[-1]))
        h = self._inner((first @ inputs)[..., 0], experts)
        down = F.embedding(experts, self.down.flatten(1)).unflatten(-1, (x.shape[-1], -1))
        out = self._biased((down @ h[..., None])[..., 0], self.down_bias, experts)
        return self._sum(out, x, chosen, weights)

    def all_experts(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [N, W], chosen and weights [N, K] -> [N, W]: all experts, those not chosen with weight zero."""
        count = self.down.shape[0]
        mix = weights.new_zeros(x.shape[0], count + self.identity).scatter(1, chosen, weights)
        inputs = self._weighed_in(x, mix[:, :count]).transpose(0, 1)  # [E, N, W]
        every = torch.arange(count, device=x.device)[:, None]
        h = self._inner(inputs @ self.first.transpose(1, 2), every)
        out = self._biased(h @ self.down.transpose(1, 2), self.down_bias, every)
        out = self._weighed_out(out.transpose(0, 1), mix[:, :count])
        return out + mix[:, count:].sum(1, keepdim=True) * x if self.identity else out

    def _inner(self, h: Tensor, experts: Tensor) -> Tensor:
        """The input of the down matrix: products h [..., 2 · inner or inner], experts [...] -> [..., inner]"""
        h = self._biased(h, self.first_bias, experts)
        if self.gated and kernels.fuses(h):
            from lamina.kernels.elementwise import gated  # imports Triton
            from lamina.kernels.gemm.epilogue import kind_of

            if kind_of(self.gating.act) is not None:
                return gated(h, self.gating)
        return self.gating(*h.chunk(2, dim=-1)) if self.gated else self.act(h)

    def _biased(self, y: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
        """y [..., out] + the rows of bias [E, out] for experts [...]"""
        return y if bias is None else y + F.embedding(experts, bias)

    def _weighed_in(self, x: Tensor, weights: Tensor) -> Tensor:
        """The input of each chosen expert: x [N, W], weights [N, K] -> [N, K, W]"""
        copies = x[:, None].expand(-1, weights.shape[1], -1)
        return (copies * weights[..., None]).to(x.dtype) if self.weigh_input else copies

    def _weighed_out(self, out: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the experts' outputs: out [N, K, W], weights [N, K] -> [N, W]"""
        return out.sum(1) if self.weigh_input else (out * weights[..., None]).sum(1)

    def _sum(self, out: Tensor, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same, where identity experts return their input whatever is in `out`."""
        if self.identity:
            out = torch.where((chosen < self.down.shape[0])[..., None], out, x[:, None])
        return self._weighed_out(out, weights)

    def _grouped_products(self, x: Tensor) -> bool:
        """True if grouped_mm is available: one kernel for the products of all groups, whose sizes the host need not
        know. A pass on the meta device runs as it would on a GPU. A CPU has it too, and an exported program uses it
        there: elsewhere lists of sizes are faster.
        """
        aligned = all(stride * x.element_size() % 16 == 0 for stride in (self.first.shape[2], self.down.shape[2]))
        if x.dtype != torch.bfloat16 or not aligned:
            return False
        if self.packed:
            return x.shape[0] >= LEAST_UNPACKED and kernels.fuses(x) and self.why_not_unpacked() is None
        anywhere = torch.compiler.is_exporting() and not portable()
        return anywhere or x.device.type in ("cuda", "meta")

    def why_not_unpacked(self) -> str | None:
        """Why packed stacks are not dequantized whole for the tokens of a prompt, which one grouped product then reads;
        None if they are. Otherwise the host must know how many tokens each expert has."""
        for stack in (self.first, self.down):
            if not isinstance(stack, Packed):
                continue
            if reason := why_unread(stack):
                return reason
            if 2 * stack.numel() > MOST_UNPACKED:
                return f"experts of {2 * stack.numel() / 2**30:.1f} GiB a layer are dequantized one by one"
        return None


def _unpacked(weight: Packed, like: Tensor) -> Tensor:
    """The stack [E, out, in] as plain values, by a kernel."""
    from lamina.kernels.packed.dequantize import dequantize  # imports Triton

    matrix = stack_of(weight)
    return dequantize(matrix, like.new_empty(matrix.shape)).view(weight.shape)


def why_host_counts(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Why the host must know the tokens of each expert in prompts of a model on a GPU; None if it need not."""
    for path, module in model.named_modules():
        if isinstance(module, Experts) and module.packed:
            reason = module.why_not_unpacked() if dtype == torch.bfloat16 else f"grouped products are not in {dtype}"
            if reason is not None:
                return f"{path}: {reason}, so the host reads how many tokens each expert has"
    return None


def _products(x: Tensor, weight: Tensor | Packed, groups: Tensor | list[int]) -> Tensor:
    """Multiplies each group of rows of x [P, in] by its expert's matrix of weight [E, out, in] -> [P, out].

    groups   [E] end of each group in x, or a list of their sizes; rows after the last group have any result
    """
    if isinstance(groups, Tensor):
        weight = _unpacked(weight, x) if isinstance(weight, Packed) else weight
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups)
    rest = x.shape[0] - sum(groups)
    parts = [(e, part) for e, part in enumerate(x.split([*groups, rest])[:-1]) if part.shape[0]]
    if isinstance(weight, Packed):
        products = [packed_linear(part, weight.entry(e)) for e, part in parts]
    else:
        products = [F.linear(part, weight[e]) for e, part in parts]
    return torch.cat([*products, x.new_zeros(rest, weight.shape[1])] if rest else products)
