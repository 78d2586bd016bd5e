"""`PromptBackend`: the memory calls of a plain pass on a GPU, with kernels for many tokens.

It stores what `PlainBackend` stores. Where no kernel fits (gradients, compiled blocks, a rule from outside the
package), it does what `PlainBackend` does. Attention is picked by `lamina.attention` (`prefill_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lamina import kernels
from lamina.attention.rotary import RopeTable
from lamina.cache.layers.base import Key
from lamina.cache.layers.recurrent import ConvolutionLayer, RecurrentLayer
from lamina.cache.plain_backend import PLAIN, PlainBackend
from lamina.cache.step import Step
from lamina.nn.norm import RMSNorm
from lamina.recurrence import SSD, GatedDelta, Rule, SelectiveScan


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

    def recur(
        self, one: Step, key: Key, entry: RecurrentLayer, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor],
        around: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        """With step sizes, skip connection and gate inside the kernel, where nobody needs the inputs it makes."""
        rule = entry.rule
        if not isinstance(rule, SSD) or not entry.needs_state_alone(one) or not self._fits(one, inputs["x"]):
            return super().recur(one, key, entry, inputs, constants, around)
        from lamina.kernels.recurrent.prompt.ssd import ssd_prompt  # imports Triton

        out, state = ssd_prompt(rule, entry.state(one, inputs), inputs, constants, one.counts, **around)
        entry.leave(one, key, inputs, constants, state)
        return out

    def run_rule(
        self, one: Step, key: Key, entry: RecurrentLayer, tokens: Mapping[str, Tensor], constants: Mapping[str, Tensor]
    ) -> Tensor:
        if not self._fits(one, tokens[entry.rule.value]) or (run := kernel_of(entry.rule)) is None:
            return super().run_rule(one, key, entry, tokens, constants)
        out, state = run(entry.rule, entry.state(one, tokens), tokens, constants, one.counts)
        entry.leave(one, key, tokens, constants, state)
        return out

    def convolve(
        self, one: Step, key: Key, entry: ConvolutionLayer, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor:  # fmt: skip
        if not self._fits(one, x):
            return super().convolve(one, key, entry, x, weight, bias, act=act, gates=gates)
        from lamina.kernels.recurrent.prompt.conv import conv_prompt  # imports Triton

        x = x if gates is None else gates[0] * x
        y = conv_prompt(entry.past(one, key, x), x, weight, bias, act, one.counts)
        return y if gates is None else gates[1] * y

    def _fits(self, one: Step, x: Tensor) -> bool:
        """Whether kernels for many tokens run this pass."""
        return one.T > 1 and one.packing is None and kernels.fuses(x)


def kernel_of(rule: Rule) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernel that runs a rule over many tokens, if there is one."""
    match rule:
        case SSD():
            from lamina.kernels.recurrent.prompt.ssd import ssd_prompt  # imports Triton

            return ssd_prompt
        case GatedDelta():
            from lamina.kernels.recurrent.prompt.gated_delta import gated_delta_prompt  # imports Triton

            return gated_delta_prompt
        case SelectiveScan():
            from lamina.kernels.recurrent.prompt.selective_scan import selective_scan_prompt  # imports Triton

            return selective_scan_prompt
    return None


PROMPT = PromptBackend()


def backend_for(device: torch.device) -> PlainBackend:
    """The backend of plain passes of a model on this device."""
    return PROMPT if device.type == "cuda" else PLAIN
