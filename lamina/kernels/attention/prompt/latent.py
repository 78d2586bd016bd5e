"""Latent attention (MLA) of many new tokens per row, in the absorbed form, for captured prompts.

The kernel is that of `mla.py`: it takes any number of queries, in blocks. Projections into the latent space and out of
it are matrix products of many rows, which PyTorch runs, and so is the merge of splits: there are splits only where few
blocks of queries leave SMs free. New tokens are in their slots before the launch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lamina.attention.window import Full
from lamina.cache.codec.registry import FormatName
from lamina.kernels.attention.mla import LEAST, _attend_latent, plan_for
from lamina.kernels.attention.online_softmax import LOWEST
from lamina.kernels.attention.visible import window_arguments
from lamina.kernels.launch import launch
from lamina.kernels.limits import limits_of
from lamina.kernels.quant.field import Coded
from lamina.kernels.slots import stages_for


def attend_latents(q: Tensor, new: Tensor | Coded, table: Tensor, *, rank: int, scale: float, page: int = 0) -> Tensor:
    """Attention over all latents of a row and those of its new tokens -> mean of latents [B, H, T, rank]

    q       [B, H, T, rank + rope]: projected into the latent space
    new     [B, T, rank + rope]: this pass's tokens, which are in their slots; only its dtypes are used
    table   the row of the cache's table for this entry
    page    slots per page; 0 without pages
    """
    B, H, T, _ = q.shape
    means, levels = latent_splits(q, new, table, rank=rank, scale=scale, page=page)
    merged = means[:, 0]
    if means.shape[1] > 1:
        shares = torch.softmax(levels * 0.6931471805599453, dim=-1)  # log2 of sums of exponentials
        merged = torch.einsum("gms,gsmr->gmr", shares, means.to(shares.dtype)).to(q.dtype)
    return merged.reshape(B, -1, rank)[:, : H * T].unflatten(1, (H, T))


def latent_splits(
    q: Tensor, new: Tensor | Coded, table: Tensor, *, rank: int, scale: float, page: int = 0
) -> tuple[Tensor, Tensor]:
    """For blocks of M queries h · T + t of each row: means of latents of each split [B · blocks, splits, M, rank], and
    log2 of its sum of exponentials [B · blocks, M, splits]. Arguments: as `attend_latents`"""
    B, H, T, D = q.shape
    limits = limits_of(q.device)
    form: FormatName = "plain"
    plan = plan_for(q.element_size(), H * T, rank, D - rank, isinstance(new, Coded), limits)
    M, shape = plan.queries, plan.shape
    blocks = triton.cdiv(H * T, M)
    splits = max(1, limits.multiprocessors // (B * blocks))
    if isinstance(new, Coded):
        form, store, scales, high = new.keys.form, new.k.codes, new.k.scales, new.k.high
    else:
        store = scales = high = new
    make = torch.empty if splits == 1 else torch.zeros  # rows may have fewer splits: those without tokens weigh nothing
    means = make(B * blocks, splits, M, rank, dtype=q.dtype, device=q.device)
    levels = torch.full((B * blocks, M, splits), LOWEST.value, device=q.device)
    kind, size, keep = window_arguments(Full())
    launch(
        _attend_latent, (B * blocks, splits),
        means, levels, q, store, scales, high, table, table, size, keep, LEAST, scale,
        *q.stride()[:3], *store.stride()[:2],
        T=T, H=H, RANK=rank, ROPE=D - rank,
        RANK_PAD=max(16, triton.next_power_of_2(rank)), ROPE_PAD=max(16, triton.next_power_of_2(D - rank)),
        M=M, ROWS=M, QUERIES=blocks, KIND=kind, FORM=form, BLOCK=shape.block, AHEAD=0, STRETCH=plan.stretch, TOP=0,
        PAGE=page, num_warps=shape.warps, num_stages=stages_for(shape.stages, page),
    )  # fmt: skip
    return means, levels
