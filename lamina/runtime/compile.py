"""`model.compile()`: blocks as compiled programs, one for each kind of block and number of tokens.

What is compiled is one block, with its weights and its stores as inputs, so that all blocks of a kind share a program
and compiling takes seconds, not minutes. The host gives a block its stores cut to what is used: the program then reads
just the tokens there are, without a mask, at any length, and growth changes nothing.

Decoding passes are compiled: few tokens, for all rows of a cache. Everything else, such as a prompt, runs as before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lamina.attention.view import View
from lamina.cache.layers.base import Key, Layer
from lamina.cache.memory import Memory
from lamina.cache.step import Step

MOST_TOKENS = 8  # of a row in a pass that is compiled


class BlockStep(Step):
    """A pass as one block sees it: its layer is number 0, and nothing is kept for other layers."""

    def __init__(self, step: Step) -> None:
        self.__dict__.update(step.__dict__)
        self.cut = step.start is not None

    def view(self, kind: Hashable, make: Callable[[], View]) -> View:
        return make()

    def share(self, key: Key, k: Tensor, v: Tensor, view: View) -> None:
        return


class CompiledBlocks:
    """Runs the blocks of a model. `options` are those of `torch.compile`."""

    def __init__(self, blocks: Iterable[nn.Module], **options: Any) -> None:
        self.blocks = [(block, kind_of(block)) for block in blocks]
        self.options = options
        self.programs: dict[Hashable, dict[Hashable, Callable[..., Tensor]]] = {}

    def __call__(self, x: Tensor, step: Step, shared: Any) -> Tensor:
        """What `block(x, step.memory(i), shared)`, block after block, gives."""
        assert step.cache is not None
        for_all, end = BlockStep(step), step.bound
        key = (*x.shape[:2], for_all.cut)
        first, programs = key not in self.programs, self.programs.setdefault(key, {})
        sources = {i for i, _ in step.cache.shared}
        for i, (block, kind) in enumerate(self.blocks):
            if i in sources or any(layer.spec.reads_from for layer in step.layers[i].values()):
                x = block(x, step.memory(i), shared)  # keys and values go from block to block
                continue
            layers = {name: cut_line(layer, end) for name, layer in step.layers[i].items()}
            if first:
                mark_slots_dynamic(layers.values())
            if kind not in programs:
                programs[kind] = _program(**self.options)
            for_all._pending = {}
            x = programs[kind](block, x, Memory(for_all, 0, layers), shared)
            for (_, name), left in for_all._pending.items():
                step.leave((i, name), left)
        return x


def kind_of(block: nn.Module) -> Hashable:
    """The same for blocks that differ in their numbers alone, as far as is seen here; `torch.compile` looks closer."""
    specs: Any = block.specs
    return type(block), tuple(specs.items()), tuple(parameter.shape for parameter in block.parameters())


def why_not_compiled(step: Step, x: Tensor) -> str | None:
    """Why this pass runs block by block as it is; None when it is compiled."""
    if step.cache is None:
        return "there is no cache"
    if step.fetched is not None:
        return "the bytes of its cache live on the host, and come to each layer as it runs"
    if step.T > MOST_TOKENS:
        return f"{step.T} tokens a row; passes of up to {MOST_TOKENS} are compiled"
    if step.cache.pages is not None:
        return "the cache lies in pages of a pool"
    if step.rows is not None or step.counts is not None or step.spans is not None:
        return "the pass is over some rows only, has padding, or has tokens that see each other both ways"
    if step.attended is not None:
        return "what is attended to is recorded"
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are wanted"
    room = [layer.slots or 0 for entry in step.layers for layer in entry.values() if is_line(layer)]
    assert step.bound is not None
    if room and (step.start == 0 or min(room) <= step.bound):
        return "a store is empty or full, which would be another program"
    return None


def is_line(layer: Layer) -> bool:
    return layer.layout is not None and layer.layout.ring is None


def cut_line(layer: Layer, end: int | None) -> Layer:
    """A line with only its first `end` slots, in the same memory; any other layer as it is."""
    if not is_line(layer):
        return layer
    return layer._with({name: tensor[..., :end, :] for name, tensor in layer.data.items()})


def mark_slots_dynamic(layers: Iterable[Layer]) -> None:
    """Says before the first compilation that the number of slots is not a constant."""
    for layer in layers:
        for tensor in layer.data.values() if layer.layout is not None else ():
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.dim() - 2)


def _run(block: nn.Module, x: Tensor, memory: Memory, shared: Any) -> Tensor:
    # Through two axes and back: an axis of length 1 may come with any stride, and another stride is another program.
    return block(x, memory, shared).reshape(-1, x.shape[-1]).view(x.shape)


def _program(**options: Any) -> Callable[..., Tensor]:
    """`_run` to be compiled, with a code object and a name of its own: `torch.compile` keeps, and limits, the compiled
    forms of a code object, and what varied under a name once is never a constant again."""
    name = f"block_{next(_serial)}"
    own = FunctionType(_run.__code__.replace(co_name=name), globals(), name)
    return torch.compile(own, fullgraph=True, **options)


_serial = itertools.count()
