"""`Largest`: the largest tensor that PyTorch makes in a `with` block, for tests of what must never be made whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """
    >>> with Largest() as made:
    ...     x = torch.zeros(10) > torch.zeros(7, 10)
    >>> made.most, made.most_of(torch.bool)
    (280, 70)
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[torch.dtype, int] = {}

    @property
    def most(self) -> int:
        """Bytes of the largest tensor; views count as much as they show, unless that is repeated."""
        return max(self.bytes.values(), default=0)

    def most_of(self, dtype: torch.dtype) -> int:
        return self.bytes.get(dtype, 0)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                shown = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
                self.bytes[x.dtype] = max(self.bytes.get(x.dtype, 0), shown)
        return out
