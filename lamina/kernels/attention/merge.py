"""Merges attention over some keys into attention over others, by the log-sum-exp of the scores of both.

The reference is `merged` below.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lamina.kernels.launch import begin, launch


def merge_into(total: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, out: Tensor | None = None) -> Tensor:
    """total and lse become those of all keys; or `out` does, and total and lse stay what they were.

    total [N, D], float32 if it is written; lse float32 [N]; more [N, D], more_lse float32 [N], all contiguous
    out   [N, D] any dtype
    """
    rows, dim = total.shape
    tile = max(1, 2048 // triton.next_power_of_2(dim))
    launch(
        _merge_into, (triton.cdiv(rows, tile),),
        total if out is None else out, total, lse, more, more_lse, rows,
        D=dim, D_PAD=triton.next_power_of_2(dim), ROWS=tile, LAST=out is not None, num_warps=4,
    )  # fmt: skip
    return total if out is None else out


def merged(total: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    share = torch.sigmoid(more_lse - lse)[:, None]
    return total * (1 - share) + more * share, torch.logaddexp(lse, more_lse)


@triton.jit
def _merge_into(
    out, total, lse, more, more_lse,  # [N, D], [N, D], [N], [N, D], [N]
    N, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i): vectors i · ROWS … + ROWS. LAST: lse is not needed any more."""
    begin(PDL)
    n, d = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D_PAD)
    real = n < N
    at, inside = n[:, None] * D + d[None, :], real[:, None] & (d < D)[None, :]
    a, b = tl.load(lse + n, mask=real, other=0.0), tl.load(more_lse + n, mask=real, other=0.0)
    x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(a, b)
    first, second = tl.exp(a - top), tl.exp(b - top)
    sums = first + second
    tl.store(
        out + at, (x * (first / sums)[:, None] + y * (second / sums)[:, None]).to(out.dtype.element_ty), mask=inside
    )
    if not LAST:
        tl.store(lse + n, top + tl.log(sums), mask=real)
