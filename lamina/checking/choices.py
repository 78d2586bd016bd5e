"""What the blocks of a pass choose for each token: experts, and the tokens that an indexer selects.

Such a choice is not continuous: at a near-tie, rounding sends a token to another expert, and then its output, and that
of the tokens behind it, cannot be compared. So choices are recorded, to tell near-ties from faults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lamina.nn.moe.experts import Experts

Choices = list[list[Tensor]]  # by block, as they are called: integers [R, T, K] for each choice that it makes


@contextlib.contextmanager
def choices(blocks: Iterable[nn.Module]) -> Iterator[Choices]:
    """Collects the choices of every block that runs inside."""
    made: Choices = []

    def begin(_: nn.Module, given: tuple[Any, ...]) -> None:
        made.append([])
        listen(given[1], made[-1])

    unique = list(dict.fromkeys(blocks))
    hooks = [block.register_forward_pre_hook(begin) for block in unique]
    hooks += [
        module.register_forward_pre_hook(lambda _, given: made[-1].append(given[1].sort(dim=-1).values))
        for block in unique
        for module in block.modules()
        if isinstance(module, Experts)
    ]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def listen(memory: Any, into: list[Tensor]) -> None:
    """Appends to `into` what `memory.select` selects from now on."""
    select = memory.select

    def selected(*given: Any, **how: Any) -> Tensor | None:
        found = select(*given, **how)
        into.append(fingerprint(found, memory.positions))
        return found

    memory.select = selected


def fingerprint(selected: Tensor | None, positions: Tensor) -> Tensor:
    """A selection of tokens as one integer per query, equal for equal selections: [R, T, S], [R, T] -> [R, T, 1]

    selected   None: every token up to the query's own

    >>> own = torch.tensor([[2]])
    >>> bool(fingerprint(None, own) == fingerprint(torch.tensor([[[True, True, True, False]]]), own))
    True
    """
    slots = int(positions.max()) + 1 if selected is None else selected.shape[-1]
    mixed = torch.arange(1, slots + 1, device=positions.device) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D  # sums of these are as good as random
    if selected is None:
        return mixed.cumsum(0)[positions][..., None]
    return (selected * mixed).sum(-1, keepdim=True)


def joined(made: Sequence[Tensor]) -> Tensor | None:
    """All choices of a block, [R, T, K]; None if it makes none."""
    return torch.cat(list(made), dim=-1) if made else None


def differ(some: Tensor, others: Tensor) -> Tensor:
    """[..., K] each -> [...]: for which tokens other choices were made."""
    return (some != others).any(dim=-1)
