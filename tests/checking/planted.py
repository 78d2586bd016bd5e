"""Blocks with one fault each, as they are made by mistake, between two blocks without any.

A fault is a function from what the block reads to what the rest of it gets. `FAULTS` names each with the laws that must
fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.attention.window import Sliding
from lamina.cache import Keeping, Memory, Recurrent, Spec, Step, Tokens
from lamina.cache.layers.base import Key
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.recurrence import SSD
from tests.laws.outside import Peak, PeakLayer
from tests.laws.toys import WIDTH, Attend, Highest, Recur, Toy

Fault = Callable[["Faulty", Tensor, Memory], Tensor]


class Faulty(Attend):
    """Attention over what the fault makes of the input. `kept` is where it may leave something."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(torch.empty(128, WIDTH))
        self.kept: Any = None
        self.calls = 0

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.fault(self, x, memory), memory, shared)


def before(x: Tensor) -> Tensor:
    """[B, T, W]: for each token, the one before it in the pass."""
    return F.pad(x, (0, 0, 1, -1))


def dropout(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return F.dropout(x, 0.1, training=True)


def counts_calls(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x * (1 + 0.05 * (block.calls % 3))


def noise_every_seventh_call(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x * 1.1 if block.calls % 7 == 0 else x


def noise_from_a_seed(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)


def mixes_rows(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x - 0.1 * x.mean(dim=0, keepdim=True)


def looks_ahead(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x + 0.1 * F.pad(x, (0, 0, -1, 1))


def normalizes_over_the_pass(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x / x.std(dim=1, keepdim=True, correction=0).clamp(min=0.5)


def shifts_within_the_pass(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x + 0.1 * before(x)


def sums_within_the_pass(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x + 0.1 * x.cumsum(dim=1)


def position_within_the_pass(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x + 0.3 * block.table[torch.arange(x.shape[1])]


def special_for_one_token(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x * 1.1 if x.shape[1] == 1 else x


def special_for_one_row(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x * 1.1 if x.shape[0] == 1 else x


def special_with_a_cache(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x if memory.step.cache is None else x * 1.1


def state_on_the_module(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    last, block.kept = block.kept, x[:, -1:].mean(dim=0, keepdim=True)
    return x if last is None else x + 0.1 * last.to(x.dtype)


def shift_on_the_module(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    """Right for one row in one cache: the last token of the pass before is kept, though not in the memory."""
    shifted = before(x)
    if block.kept is not None and block.kept.shape[0] == x.shape[0]:
        later = (memory.positions[:, :1] > 0)[..., None]
        shifted[:, :1] = torch.where(later, block.kept.to(x.dtype), shifted[:, :1])
    block.kept = x[:, -1:].clone()
    return x + 0.1 * shifted


def sum_beside_the_memory(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    """A running sum of each row by cache, which counts what is taken back later."""
    step = memory.step
    real = x if step.valid is None else x.masked_fill(~step.valid[..., None], 0)
    sums = real.cumsum(dim=1)
    if step.cache is not None:
        block.kept = {} if block.kept is None else block.kept
        held = block.kept.setdefault(step.cache, x.new_zeros(step.cache.rows, 1, WIDTH))
        index = slice(None) if step.rows is None else step.rows
        sums = sums + held[index]
        held[index] = sums[:, -1:]
    return x + 0.1 * sums


def changes_its_input(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x.mul_(1.1)


def changes_the_positions(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    memory.positions.add_(1)
    return x


def depends_on_capacity(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x if memory.layer.bare else x * (1 + 0.01 * memory.layer.slots)


def depends_on_neighbours(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    after = memory.step.after
    return x * (1 + 0.05 * (after.max() - after)[:, None, None])


def depends_on_dtype(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    return x if x.dtype == torch.float64 else x * 1.1


def reads_unused_slots(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    held = memory.layer.data.get("k")
    return x if held is None or held.shape[2] == 0 else x + 0 * held.sum(dim=(1, 2, 3))[: len(x), None, None]


def raises_for_one_token(block: Faulty, x: Tensor, memory: Memory) -> Tensor:
    if x.shape[1] == 1:
        raise IndexError("nothing before the first token")
    return x


class ChangesShared(Attend):
    """Puts its own factor on the table that all blocks share."""

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        return super().forward(x, memory, shared.mul_(0.5))


@dataclass(frozen=True)
class OneMore(Sliding):
    """Sees one token more than it says it does."""

    def sees(self, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv <= self.size


class OwnMask(nn.Module):
    """A mean over the last five tokens in passes without a past, over the last four otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.specs = {"tokens": Tokens(WIDTH, Sliding(4))}

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        kept, seen = memory.recall(x)  # [B, S, W], [B, T, S]
        if kept.shape[1] == x.shape[1]:
            back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            seen = ((back >= 0) & (back < 5)).expand_as(seen)
        weights = seen.to(x.dtype)
        return x + (weights / weights.sum(dim=-1, keepdim=True)) @ kept


@dataclass(frozen=True)
class LeakyState(Recurrent):
    def layer(self, keeping: Keeping | None) -> LeakyLayer:
        return LeakyLayer(self, keeping)


class LeakyLayer(RecurrentLayer):
    """Takes padding for tokens."""

    def leave(self, step: Step, key: Key, inputs: Any, constants: Any, state: Tensor) -> None:
        _, state = self.rule.chunk(self.state(step, inputs), inputs, constants, None)
        super().leave(step, key, inputs, constants, state)


@dataclass(frozen=True)
class UnrewoundState(Recurrent):
    def layer(self, keeping: Keeping | None) -> UnrewoundLayer:
        return UnrewoundLayer(self, keeping)


class UnrewoundLayer(RecurrentLayer):
    def rewind(self, *_: Any) -> None:
        """Leaves the state as it is."""


@dataclass(frozen=True)
class Sum(Peak):
    """The sum of all inputs so far, by channel. `kind` is how its layer goes wrong."""

    kind: type[SumLayer] | None = None

    def layer(self, keeping: Keeping | None) -> SumLayer:
        return (self.kind or SumLayer)(self, keeping)


class SumLayer(PeakLayer):
    def highest(self, step: Step, key: Key, x: Tensor) -> Tensor:
        if self.bare:
            return x.cumsum(dim=1)
        slot = self.ring.slots((step.before - 1).clamp(min=0))[:, None, None].expand(-1, 1, x.shape[-1])
        past = step.take(self.data["peaks"]).gather(1, slot)
        past = past.masked_fill((step.before == 0)[:, None, None], 0)
        x = x if step.valid is None else x.masked_fill(~step.valid[..., None], 0)
        sums = past + x.cumsum(dim=1)
        step.leave(key, sums)
        return sums


class WrittenInThePass(SumLayer):
    def highest(self, step: Step, key: Key, x: Tensor) -> Tensor:
        sums = super().highest(step, key, x)
        if not self.bare:
            super().commit(step, sums, step.all_counts)
        return sums


class SharedByForks(SumLayer):
    def select(self, index: Tensor) -> Any:
        whole = index.tolist() == list(range(len(self.data["peaks"])))
        return self._with(dict(self.data)) if whole else super().select(index)


class NotTakenBack(SumLayer):
    """Counts tokens that were given, not those that were accepted."""

    def commit(self, step: Step, left: Tensor, accepted: Tensor) -> None:
        last = left.gather(1, (step.all_counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, left.shape[-1]))
        super().commit(step, torch.cat([left[:, :-1], last], dim=1) if step.T == 1 else last.expand_as(left), accepted)


def remembering(block: Any, name: str, spec: Spec) -> nn.Module:
    block.specs = {name: spec}
    return block


RULE = SSD(heads=4, head_dim=2, state=3, groups=2)


@dataclass(frozen=True)
class Planted:
    """What makes the block, and the laws that must fail; `said` is in the verdict."""

    block: Callable[[], nn.Module]
    laws: set[str]
    said: str = ""
    length: int = 14

    def model(self, dtype: torch.dtype = torch.float32) -> Toy:
        """Layer 1 has the fault."""
        return Toy(Attend(), self.block(), Attend(), dtype=dtype)


def by(fault: Fault, *laws: str, said: str = "") -> Planted:
    return Planted(lambda: Faulty(fault), set(laws), said)


def summing(kind: type[SumLayer], *laws: str) -> Planted:
    return Planted(lambda: remembering(Highest(), "peak", Sum(WIDTH, kind)), set(laws))


FAULTS: dict[str, Planted] = {
    "dropout left on": by(dropout, "determinism", said="two equal passes differ by"),
    "noise that counts calls": by(counts_calls, "determinism"),
    "noise every seventh call": by(noise_every_seventh_call, "determinism"),
    "noise from a seed": by(noise_from_a_seed, "chunking", "independence"),
    "rows are mixed": by(mixes_rows, "independence", "poison", "subsets"),
    "looks ahead": by(looks_ahead, "chunking"),
    "normalized over the pass": by(normalizes_over_the_pass, "chunking"),
    "token shift within the pass": by(shifts_within_the_pass, "chunking"),
    "running sum within the pass": by(sums_within_the_pass, "chunking"),
    "position within the pass": by(position_within_the_pass, "chunking"),
    "special case for one token": by(special_for_one_token, "chunking"),
    "special case for one row": by(special_for_one_row, "independence"),
    "another path with a cache": by(special_with_a_cache, "chunking"),
    "state on the module": by(state_on_the_module, "determinism"),
    "token shift kept on the module": by(shift_on_the_module, "determinism"),
    "running sum beside the memory": by(sum_beside_the_memory, "rewind", "acceptance", "atomic", "rows", "file"),
    "input changed in place": by(changes_its_input, "inputs", said="changes its input"),
    "positions changed in place": by(changes_the_positions, "inputs"),
    "shared table changed in place": Planted(ChangesShared, {"inputs"}),
    "depends on capacity": by(depends_on_capacity, "chunking"),
    "depends on neighbours' lengths": by(depends_on_neighbours, "independence"),
    "depends on dtype": by(depends_on_dtype, "precision", said="allowed 0.001"),
    "reads unused slots": by(reads_unused_slots, "poison"),
    "raises for one token": by(raises_for_one_token, "determinism", said="raised IndexError: nothing before"),
    "window one too wide": Planted(lambda: Attend(OneMore(4)), {"chunking"}, length=20),
    "mask of its own": Planted(OwnMask, {"chunking"}, length=20),
    "padding enters the state": Planted(
        lambda: remembering(Recur(RULE), "state", LeakyState(RULE)), {"independence", "poison"}
    ),
    "state not rewound": Planted(lambda: remembering(Recur(RULE), "state", UnrewoundState(RULE)), {"rewind"}),
    "written before commit": summing(WrittenInThePass, "atomic"),
    "a fork shares its parent's memory": summing(SharedByForks, "rows"),
    "refused tokens are kept": summing(NotTakenBack, "acceptance"),
}
