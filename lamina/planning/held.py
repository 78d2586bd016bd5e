"""What a pass holds besides weights and cache, found by running it on the meta device, where nothing has memory.

PyTorch tells of every tensor that is made, and Python lets go of it when nobody needs it any more, as in a real pass.
So the most that is held at once is that of a real pass to the byte: activations, masks, what layers leave for commit,
new states, logits. What a kernel takes inside itself is not seen, above all attention's: it is taken to be fused, as
PyTorch's is wherever scores are not changed.

Most of a pass is repetition: blocks of one kind, chunks of one recurrence. They are run until it is known what one of
them holds, and from then on only counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lamina.cache.spec import Recurrent
from lamina.model import Model
from lamina.runtime.compile import kind_of


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of tensors made in a `with` block: those alive, and the most that were at once.

    >>> with AllocationMeter() as held:
    ...     x = torch.zeros(100) + torch.zeros(100)
    >>> held.now, held.most
    (400, 1200)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}  # address of a storage that is alive -> its number
        self._made = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if not _gives_what_it_got(op):
            for x in [out] if isinstance(out, Tensor) else tree_leaves(out):
                if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._known:  # some views are not told
                    self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._made += 1
        self._known[storage._cdata] = self._made
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes()).atexit = False

    def _drop(self, address: int, nbytes: int) -> None:
        del self._known[address]
        self.now -= nbytes

    # -- what is the same again --------------------------------------------------------------------------------------

    def measured(self, run: Callable[[], Any]) -> tuple[Any, Trace]:
        """Runs it; -> what it gives, and what it held."""
        before, most, made = self.now, self.most, self._made
        self.most = before
        out = run()
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tree_leaves(out)}
        new = sum(nbytes for address, nbytes in storages.items() if self._known.get(address, 0) > made)
        trace = Trace(self.most - before, self.now - before - new, tree_map_only(Tensor, _form, out))
        self.most = max(most, self.most)
        return out, trace

    def again(self, trace: Trace) -> Any:
        """As if it had run once more."""
        self.most = max(self.most, self.now + trace.most)
        self.now += trace.kept
        return tree_map_only(TensorShape, TensorShape.tensor, trace.out)


@cache
def _gives_what_it_got(op: Any) -> bool:
    """Whether an operation's outputs lie in the memory of its inputs: views, and writing in place."""
    return any(out.alias_info is not None for out in op._schema.returns)


@dataclass(frozen=True)
class TensorShape:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def _form(x: Tensor) -> TensorShape:
    return TensorShape(tuple(x.shape), x.stride(), x.dtype, x.device)


@dataclass(frozen=True)
class Trace:
    """What running something held: the most at once, what stays alive besides its outputs, and their form."""

    most: int
    kept: int
    out: Any


class Fused(TorchFunctionMode):
    """Attention as one kernel that holds nothing but its output, which lies in memory as PyTorch's kernels write it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        q, v = given["query"], given["value"]
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)  # [B, T, H, D]


class Rehearsal:
    """Passes of a model on the meta device, which nobody else may use: its blocks and rules are made to count."""

    def __init__(self, model: Model) -> None:
        self.held = AllocationMeter()
        self.traces: dict[Hashable, Trace | None] = {}
        specs = [spec for entry in model.specs for spec in entry.values()]
        stacks = [getattr(module, "blocks", None) for module in model.modules()]  # of the model, and of its encoder
        blocks = {id(block): block for stack in stacks if isinstance(stack, nn.ModuleList) for block in stack}
        sources = {id(model.blocks[spec.reads_from[0]]) for spec in specs if spec.reads_from is not None}
        for key in blocks.keys() - sources:  # those keep tokens for others
            blocks[key].forward = self._block(blocks[key].forward, _kind(blocks[key]))
        for rule in {id(spec.rule): spec.rule for spec in specs if isinstance(spec, Recurrent)}.values():
            object.__setattr__(rule, "chunks", self._chunks(rule.chunks, rule))  # frozen, but ours alone

    def most(self, run: Callable[[], object]) -> int:
        """The most bytes that `run` holds at once; it runs a pass and leaves nothing."""
        self.held, self.traces = AllocationMeter(), {}
        with torch.device("meta"), torch.no_grad(), Fused(), self.held:
            run()
        return self.held.most

    def _block(self, forward: Callable[..., Tensor], kind: Hashable) -> Callable[..., Tensor]:
        """The first of a kind may make what all share (a mask); what the second holds is what each other holds."""

        def run(*args: Any) -> Tensor:
            if (trace := self.traces.get(kind)) is not None:
                return self.held.again(trace)
            out, trace = self.held.measured(lambda: forward(*args))
            self.traces[kind] = trace if kind in self.traces else None
            return out

        return run

    def _chunks(self, chunks: Callable[..., Any], rule: Hashable) -> Callable[..., Any]:
        def run(state: Tensor, inputs: dict[str, Tensor], constants: dict[str, Tensor]) -> Any:
            key = (rule, _form(state), *(_form(x) for x in inputs.values()))
            if (trace := self.traces.get(key)) is not None:
                return self.held.again(trace)
            out, self.traces[key] = self.held.measured(lambda: chunks(state, inputs, constants))
            return out

        return run


def _kind(block: nn.Module) -> Hashable:
    """The same for blocks that differ in nothing but their numbers."""
    plain = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None)
    )
    return kind_of(block), plain
