"""`AllocationMeter`: the bytes of the tensors that PyTorch makes, those alive and the most at once, on any device.

A dispatch mode sees every tensor that PyTorch makes, and a weak reference sees when Python frees it. Memory that a
kernel allocates inside itself is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: PyTorch would otherwise import torch._dynamo at the first operation, which takes seconds."""
        return False

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
        trace = Trace(self.most - before, self.now - before - new, tree_map_only(Tensor, shape_of, out))
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


def shape_of(x: Tensor) -> TensorShape:
    return TensorShape(tuple(x.shape), x.stride(), x.dtype, x.device)


@dataclass(frozen=True)
class Trace:
    """What running something held: the most at once, what stays alive besides its outputs, and their form."""

    most: int
    kept: int
    out: Any
