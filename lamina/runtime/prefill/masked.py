"""Attention on a GPU where positions do not decide what queries see: rules from outside, selections, windows and biases
from outside. What exists of a mask at once is bounded.

    kernel over mask bits   the kernels of `attention.py` read the mask as bits (`lamina.attention.mask_bits`). If all
                            bits fit into `MOST_BYTES`, all layers that share the View share them; otherwise each
                            layer takes the queries in turns
    sdpa in turns           what no kernel takes (heads of more than 256 values): a mask for some queries at a time
    eager in turns          the same with scores that are changed (a bias without a formula for kernels)

`sdpa` and `eager` run undivided where their masks and scores fit into `ROOM`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.bias import KernelForm, kernel_form
from lamina.attention.core import OFFERS, Offer
from lamina.attention.mask_bits import queries_at_once
from lamina.attention.reference import Bias
from lamina.attention.torch_backends import eager, sdpa
from lamina.attention.view import View
from lamina.kernels.limits import limits_of
from lamina.runtime.prefill.attention import FEWEST, biases, heads_fit, is_few, is_known

ROOM = 1 << 26  # bytes of masks and scores at once
PAIR = 25, 3, 16  # bytes of a pair of query and key: of the rule; of the mask, and of scores, for each query head


def over_bits(
    q: Tensor, k: Tensor, v: Tensor, view: View, *, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None, bias: Bias | None = None,
) -> Tensor:  # fmt: skip
    from lamina.kernels.attention.prefill.few import attend_few, few_tile  # imports Triton
    from lamina.kernels.attention.prefill.many import attend_many, tile_for
    from lamina.kernels.attention.score_bias import bias_arguments

    (Hq, T, D), Dv, limits = q.shape[1:], v.shape[-1], limits_of(q.device)
    form: KernelForm | None = None if bias is None else kernel_form(bias)
    kind = bias_arguments(form)[1]
    how: dict[str, Any] = dict(scale=scale, softcap=softcap, sinks=sinks, bias=form)
    if is_few(q, k):
        tile = few_tile(Hq // k.shape[1] * T, D, Dv, q.element_size(), limits, kind)
        return attend_few(q, k, v, view, mask=view.mask_bits(tile.queries, tile.block), **how)
    tile = tile_for(T, D, Dv, q.element_size(), limits, kind, bits=True)

    def run(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return attend_many(q, k, v, view, tile=tile, mask=view.mask_bits(tile.queries, tile.block), **how)

    return in_turns(run, q, k, v, view, queries_at_once(view, tile.queries, tile.block))


def bits_fit(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> bool:
    if not kernels.fuses(q) or q.shape[2] < FEWEST or not heads_fit(q, k, v) or (view.positional and is_known(view)):
        return False
    return bias is None or biases(kernel_form(bias), view.causal)


def in_turns(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, view: View, size: int) -> Tensor:
    """run(q, k, v, view) for `size` queries after the other: [B, Hq, T, Dv], a view of a tensor [B, T, Hq, Dv]"""
    B, Hq, T, _ = q.shape
    if size >= T:
        return run(q, k, v, view)
    out = q.new_empty(B, T, Hq, v.shape[-1])
    for first in range(0, T, size):
        some = slice(first, first + size)
        out[:, some] = run(q[:, :, some], k, v, view.part(some)).transpose(1, 2)
    return out.transpose(1, 2)


def at_once(q: Tensor, k: Tensor, scored: bool) -> int:
    """How many queries' masks, or masks and scores, fit into `ROOM`."""
    (B, Hq, _, _), (Hk, S) = q.shape, k.shape[1:3]
    rule, mask, score = PAIR
    return max(ROOM // (B * S * (rule + (Hq * score if scored else Hq // Hk * mask))), 1)


def on_gpu(q: Tensor) -> bool:
    """Whether this is a plain pass on a GPU without gradients; turns need no kernels."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return q.is_cuda or kernels.fuses(q)


def offer_in_turns(backend: Callable[..., Tensor], scored: bool) -> Offer:
    def run(q: Tensor, k: Tensor, v: Tensor, view: View, **how: Any) -> Tensor:
        return in_turns(lambda *given: backend(*given, **how), q, k, v, view, at_once(q, k, scored))

    def fits(
        q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
    ) -> bool:
        changed = softcap is not None or sinks is not None or bias is not None
        if changed != scored or not on_gpu(q) or q.shape[2] < FEWEST:
            return False
        return (scored or not view.unmasked) and at_once(q, k, scored) < q.shape[2]

    return Offer(run, fits)


OFFERS["kernel over mask bits"] = Offer(over_bits, bits_fit, masks_itself=True)
OFFERS["sdpa in turns"] = offer_in_turns(sdpa, scored=False)
OFFERS["eager in turns"] = offer_in_turns(eager, scored=True)
