"""The memory that the kernels of one captured program work in, besides their inputs and outputs.

Kernels of one program run one after the other, so they can share it. Two programs may run at the same time, for two
callers on two streams, so each has a workspace of its own (`lamina.runtime.captured`). Kernels that are launched
outside a captured program, as tests and benchmarks do, use one workspace for each device.

    with in_use(workspace):              # lamina.kernels
        parts, counters = scratch(x.device)
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lamina import kernels
from lamina.errors import LaminaError
from lamina.kernels.device_guard import capturing
from lamina.kernels.gemm.fusion import Fusions

PARTS = 4 << 20  # float32 values for partial sums
COUNTERS = 1 << 16
MOST_NORMS = 512  # of one step
NORM_COUNTERS = 32  # int64 values for the squares of one norm: see deferred_norm.py


class Workspace:
    """Allocated at the first use, which must not be while a CUDA graph is being captured.

    fusions   which norms are computed by the launch in front of them; none unless a captured program sets its plan
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.fusions = Fusions()
        self._scratch: tuple[Tensor, Tensor] | None = None
        self._arrivals: Tensor | None = None
        self._sums: Sums | None = None

    @property
    def scratch(self) -> tuple[Tensor, Tensor]:
        """[PARTS] float32, where partial sums meet, and [COUNTERS] int32, zero between two kernels."""
        if self._scratch is None:
            self._check_not_capturing()
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
            self._scratch = torch.empty(PARTS, device=self.device), counters
        return self._scratch

    @property
    def arrivals(self) -> Tensor:
        """[COUNTERS] int32: how many programs of attention are done with their part; zero between two kernels."""
        if self._arrivals is None:
            self._check_not_capturing()
            self._arrivals = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
        return self._arrivals

    @property
    def sums(self) -> Sums:
        """The squares of the norms of one step."""
        if self._sums is None:
            self._check_not_capturing()
            self._sums = Sums(self.device)
        return self._sums

    def _check_not_capturing(self) -> None:
        if capturing(self.device):
            raise LaminaError("a workspace of kernels cannot be made while a graph is captured: run the program before")


class Sums:
    """Counters for the norms of one step, in the order in which they come; zero when a step begins."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(MOST_NORMS, NORM_COUNTERS, dtype=torch.int64, device=device)
        self.taken = self.used = 0

    def begin(self) -> Tensor:
        """A step begins to take counters; -> those that any step has used so far, to be set to zero."""
        self.taken = 0
        return self.tensor[: self.used]

    def take(self) -> Tensor | None:
        """The counters of the next norm; None where a step has more norms than there are counters."""
        if self.taken == MOST_NORMS:
            return None
        self.taken += 1
        self.used = max(self.used, self.taken)
        return self.tensor[self.taken - 1]


def workspace(device: torch.device) -> Workspace:
    """That of the captured program which this thread runs; outside of one, the device's."""
    return kernels.workspace_in_use() or _of_device(device)


def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where partial sums meet, and their counters."""
    return workspace(device).scratch


def arrivals(device: torch.device) -> Tensor:
    """Counters of attention: the last program of each set puts its counter back to zero."""
    return workspace(device).arrivals


def sums(device: torch.device) -> Sums:
    """The squares of the norms of the step that this thread runs."""
    return workspace(device).sums


def fusions(device: torch.device) -> Fusions:
    """The fusion plan of the program that this thread runs, and the results of its step that wait for their norm."""
    return workspace(device).fusions


@cache
def _of_device(device: torch.device) -> Workspace:
    return Workspace(device)
