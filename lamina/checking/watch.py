"""Hooks on the blocks of a model for one pass: what each is given and makes, and what it does to its arguments.

Given an earlier watch of the same pass, each block's output is compared with the earlier one bit for bit, and the next
block gets the earlier one. So every block runs on the same input both times, and the one that differs is named even if
another differs before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lamina.checking.choices import Choices, choices, joined
from lamina.model import Model


class Watch:
    """`with watch.on(): model.forward(…)`. Blocks are counted as they are called: a model may hold a block twice."""

    def __init__(self, model: Model, earlier: Watch | None = None) -> None:
        self.model, self.earlier = model, earlier
        self.inputs: list[Tensor] = []  # by block: [R, T, W]
        self.outputs: list[Tensor] = []
        self.chosen: list[Tensor | None] = []  # by block: what it chose for each token [R, T, K], if it chooses
        self._untouched: list[Tensor] = []  # by block: whether its arguments are what they were
        self._given: list[Tensor] = []
        self._choices: Choices = []

    @contextlib.contextmanager
    def on(self) -> Iterator[Watch]:
        blocks = list(dict.fromkeys(self.model.blocks))
        hooks = [block.register_forward_pre_hook(self._before) for block in blocks]
        hooks += [block.register_forward_hook(self._after) for block in blocks]
        try:
            with choices(blocks) as self._choices:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        self.inputs.append(given[0].clone())
        if self.earlier is not None and len(self.inputs) == 1:  # the others get what `_after` gives
            given = (self.earlier.inputs[0].clone(), *given[1:])
        self._given = [tensor.clone() for tensor in _tensors(given)]
        return given

    def _after(self, _: nn.Module, given: tuple[Any, ...], made: Tensor) -> Tensor | None:
        same = [equal(now, then).all() for now, then in zip(_tensors(given), self._given, strict=True)]
        self._untouched.append(torch.stack(same).all())
        self.chosen.append(joined(self._choices[-1]))
        self.outputs.append(made.clone())
        at = len(self.outputs) - 1
        return None if self.earlier is None or at >= len(self.earlier.outputs) else self.earlier.outputs[at].clone()

    @property
    def running(self) -> int | None:
        """The block that has begun and not ended: the one that raised."""
        return len(self.outputs) if len(self.inputs) > len(self.outputs) else None

    def touched(self) -> list[int]:
        """The blocks that changed an argument in place: their input, what blocks share, or the positions."""
        kept = torch.stack(self._untouched).tolist() if self._untouched else []
        return [i for i, same in enumerate(kept) if not same]

    def differing(self, counts: list[int]) -> list[int]:
        """The blocks that made something else than in the earlier watch, of each row's first `counts` tokens."""
        assert self.earlier is not None
        pairs = [*zip(self.earlier.outputs, self.outputs, strict=False)]  # as many as both have
        same = torch.stack([same_bits(*pair, counts).all() for pair in pairs]).tolist() if pairs else []
        return [i for i, equals in enumerate(same) if not equals]


def equal(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors hold the same value, NaN included."""
    return (a == b) | ((a != a) & (b != b))


def same_bits(then: Tensor, now: Tensor, counts: list[int]) -> Tensor:
    """[R, T, W] each -> [R, T]: which tokens have the same bits. What padding has does not matter."""
    padding = torch.arange(then.shape[1]) >= torch.tensor(counts)[:, None]
    return equal(then, now).flatten(2).all(dim=-1) | padding.to(then.device)


def _tensors(given: tuple[Any, ...]) -> list[Tensor]:
    """The tensors in what a block is given: its input, what all blocks share, and the positions."""
    x, memory, *shared = given
    return [x, memory.positions, *_inside(shared)]


def _inside(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _inside(part)] if isinstance(value, tuple | list) else []
