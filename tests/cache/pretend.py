"""A device that is not the host, where there is none: the meta device, with host memory that is real.

Nothing is computed there, but every operation is looked at: none may mix the two, except the copies between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.cache.clock import Clock, allocate

DEVICE = torch.device("meta")
COPIES = ("aten::copy_", "aten::_to_copy")


class Apart(TorchDispatchMode):
    """Refuses operations on tensors of both devices; single numbers may go anywhere, as PyTorch lets them."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor) and x.dim()]
        devices = {x.device.type for x in given}
        assert len(devices) < 2 or op._schema.name in COPIES, f"{op} on {devices}"
        return op(*args, **(kwargs or {}))


def _host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: float | None = None) -> Tensor:
    return allocate(shape, dtype, torch.device("cpu"), 0)


_copy, _to, _plain_tolist = Tensor.copy_, Tensor.to, Tensor.tolist


def _copy_anywhere(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    if self.device.type == "cpu" and other.device.type == "meta":
        assert other.expand(self.shape).shape == self.shape
        return self
    return _copy(self, other, non_blocking)


def _to_anywhere(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    target = args[0] if args else kwargs.get("device")
    device = target.device if isinstance(target, Tensor) else target
    home = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    known = torch.zeros(self.shape, dtype=self.dtype) if self.device.type == "meta" and home else self
    return _to(known, *args, **kwargs)


def _tolist(self: Tensor) -> list[Any]:
    return [2**20] * self.numel() if self.device.type == "meta" else _plain_tolist(self)


@contextmanager
def two_devices() -> Iterator[None]:
    """Inside, tensors on the meta device can be copied to the host, as zeros; lengths are what the host takes them for,
    and any row can be taken back."""
    with (
        patch("lamina.cache.storage.host.host_tensor", _host_tensor),
        patch("lamina.cache.storage.prefetch.host_tensor", _host_tensor),
        patch.object(Tensor, "copy_", _copy_anywhere),
        patch.object(Tensor, "to", _to_anywhere),
        patch.object(Clock, "sync", lambda self: list(self.low)),
        patch.object(
            Clock, "read_marks", lambda self: [[n, n, base] for n, base in zip(self.low, self.base_low, strict=True)]
        ),
        patch.object(Tensor, "tolist", _tolist),
        Apart(),
    ):
        yield
