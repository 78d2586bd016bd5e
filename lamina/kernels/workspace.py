"""Scratch memory of the kernels of one captured program, besides their inputs and outputs.

The kernels of one program run one after the other, so they share it. Two programs may run at the same time, for two
callers on two streams, so each program has its own workspace (`lamina.runtime.captured`). Kernels that are launched
outside a captured program, in tests and benchmarks, use one workspace per device.

    with in_use(workspace):              # lamina.kernels
        parts, counters = scratch(x.device)
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lamina import kernels
from lamina.errors import LaminaError
from lamina.kernels.device_guard import is_capturing
from lamina.kernels.gemm.fusion import Fusions

PARTS = 4 << 20  # float32 values for partial sums
COUNTERS = 1 << 16
MOST_NORMS = 512  # per step
NORM_COUNTERS = 32  # int64 counters for the sum of squares of one norm: see deferred_norm.py


class Workspace:
    """Each part is allocated at its first use, which must not be during the capture of a CUDA graph.

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
        """Partial sums, float32 [PARTS], and counters, int32 [COUNTERS], which are zero between two kernels."""
        if self._scratch is None:
            self._check_not_capturing()
            counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
            self._scratch = torch.empty(PARTS, device=self.device), counters
        return self._scratch

    @property
    def arrivals(self) -> Tensor:
        """Counters of attention, int32 [COUNTERS]: splits that are stored; zero between two kernels."""
        if self._arrivals is None:
            self._check_not_capturing()
            self._arrivals = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device)
        return self._arrivals

    @property
    def sums(self) -> Sums:
        """Sums of squares of the norms of one step."""
        if self._sums is None:
            self._check_not_capturing()
            self._sums = Sums(self.device)
        return self._sums

    def _check_not_capturing(self) -> None:
        if is_capturing(self.device):
            raise LaminaError(
                "the workspace of kernels cannot be made while a graph is captured: run the program once before"
            )


class Sums:
    """Counters for the norms of one step, in the order of the norms; zero when a step begins.

    tensor   int64 [MOST_NORMS, NORM_COUNTERS]
    taken    norms of this step so far
    used     the most norms of any step so far
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(MOST_NORMS, NORM_COUNTERS, dtype=torch.int64, device=device)
        self.taken = self.used = 0

    def begin(self) -> Tensor:
        """Begins a step; -> the counters that any step has used so far, which the caller sets to zero."""
        self.taken = 0
        return self.tensor[: self.used]

    def take(self) -> Tensor | None:
        """The counters of the next norm, [NORM_COUNTERS]; None if a step has more norms than there are counters."""
        if self.taken == MOST_NORMS:
            return None
        self.taken += 1
        self.used = max(self.used, self.taken)
        return self.tensor[self.taken - 1]


def workspace(device: torch.device) -> Workspace:
    """The workspace of the captured program that this thread runs; outside of one, the device's."""
    return kernels.workspace_in_use() or _of_device(device)


def scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and their counters."""
    return workspace(device).scratch


def arrivals(device: torch.device) -> Tensor:
    """Counters of attention. The last program of each set resets its counter to zero."""
    return workspace(device).arrivals


def sums(device: torch.device) -> Sums:
    """Sums of squares of the norms of the step that this thread runs."""
    return workspace(device).sums


def fusions(device: torch.device) -> Fusions:
    """The fusion plan of the program that this thread runs, and the results of its step that wait for their norm."""
    return workspace(device).fusions


@cache
def _of_device(device: torch.device) -> Workspace:
    return Workspace(device)
