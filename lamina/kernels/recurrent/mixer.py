"""A recurrent mixer between its two projections, one token per row, in one kernel: convolution, rule, gate, norm.

As separate kernels these are three launches that move few bytes, and each takes longer to start than to run. Here a
program holds a tile of one head's state, as in `state.py`, and convolves the channels that its tile needs by itself:
the head's own, and those that the heads of a group share, which every program of the group computes again. A row writes
one slot of the convolution's ring, which is none of the slots that are read, so programs do not wait for each other,
and each channel of that slot is written by one program. With several tokens per row the slots would overlap: then
`conv.py` and `recur.py` run one after the other.

    mixer_stages.py      the convolution before the rule; gate, norm and stores after it
    mixer_ssd.py         the kernel around SSD
    mixer_delta.py       the kernel around the delta rules

Everything that the launch just before does not write is loaded before waiting for it: state, ring, taps, parameters.
Rows without a token write zeros to the output and nothing else. Reference: `memory.mix` on plain layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.kernels.recurrent.mixer_delta import mix_delta
from lamina.kernels.recurrent.mixer_ssd import mix_ssd
from lamina.kernels.recurrent.state import bandwidth_bound
from lamina.recurrence import SSD, ChannelDelta, GatedDelta, Rule
from lamina.recurrence.rule import Tensors

if TYPE_CHECKING:
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


def mix_is_faster(rule: Rule, rows: int, tokens: int) -> bool:
    """Whether `mix_step` supports this pass and beats one kernel for each part.

    Many SSD states move faster in a kernel that does nothing else: here every program of a group convolves the group's
    B and C again.
    """
    values = rows * torch.Size(rule.state_shape).numel()
    delta = isinstance(rule, GatedDelta | ChannelDelta)
    return tokens == 1 and (delta or (isinstance(rule, SSD) and not bandwidth_bound(values)))


def mix_step(
    rule: Rule,
    x: Tensor,
    inputs: Tensors,
    constants: Tensors,
    rings: Tensor,
    table: Tensor,
    *,
    conv: ShortConvolution,
    gate: Tensor,
    norm: GatedRMSNorm | None = None,
    **around: Any,
) -> Tensor:
    """`memory.mix` on the ring behind the table row `rings` and the state behind the table row `table`, in place.

    x [B, 1, C] and gate [B, 1, W] with each row's values contiguous, inputs [B, 1, H] (log decays also [B, 1, H, D])
    -> [B, 1, W] in the gate's dtype.
    With one row and one norm over all of it, the result is `Unnormed`: the product that follows divides it.

    around   keywords of the rule's kernel; `tile`: another tile per program than `TILES` has
    """
    if x.shape[1] != 1:
        raise InputError(f"mix_step takes one token a row, not {x.shape[1]}; use convolve_step and recur_step")
    match rule:
        case SSD():
            return mix_ssd(rule, x, inputs, constants, rings, table, conv, gate, norm, **around)
        case GatedDelta() | ChannelDelta():
            return mix_delta(rule, x, inputs, rings, table, conv, gate, norm, **around)
    raise InputError(f"no kernel mixes by the rule {rule}; there is one for SSD, GatedDelta and ChannelDelta")
