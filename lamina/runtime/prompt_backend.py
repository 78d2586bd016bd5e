"""`PromptBackend`: the memory calls of a plain pass on a GPU, with kernels for many tokens.

It stores what `PlainBackend` stores. Where no kernel fits (gradients, compiled blocks, a rule from outside the
package), it does what `PlainBackend` does. Attention is picked by `lamina.attention` (`prefill_attention.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.rotary import RopeTable
from lamina.cache.plain_backend import PLAIN, PlainBackend
from lamina.cache.step import Step
from lamina.nn.norm import RMSNorm


class PromptBackend(PlainBackend):
    """Has no state, as `PlainBackend`."""

    def norm_and_rotate(
        self, one: Step, x: Tensor, *, rope: RopeTable | None, neighbours: bool, norm: RMSNorm | None, norms_last: bool,
        factor: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if (rope is None and norm is None and factor is None) or not kernels.fuses(x):
            return super().norm_and_rotate(
                one, x, rope=rope, neighbours=neighbours, norm=norm, norms_last=norms_last, factor=factor
            )
        from lamina.kernels.elementwise import rotate_heads  # imports Triton

        return rotate_heads(x, rope, neighbours=neighbours, norm=norm, norms_last=norms_last, factor=factor)


PROMPT = PromptBackend()


def backend_for(device: torch.device) -> PlainBackend:
    """The backend of plain passes of a model on this device."""
    return PROMPT if device.type == "cuda" else PLAIN
