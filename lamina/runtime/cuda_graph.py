"""How a program of kernels becomes a CUDA graph, and how values reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

Program = Callable[[], object]

_one_at_a_time = Lock()  # CUDA allows one capture at a time in a process


def recorded(device: torch.device, *programs: Program) -> list[Program]:
    """A replay of each program; what one of them leaves in its memory, the following may read.

    The programs are run first, in their order, so that kernels are built and loaded and workspaces allocated, and
    anything that cannot be launched fails here. The caller takes care that running them changes nothing. Other threads
    may go on meanwhile: they may launch, and load kernels of another model.
    """
    with _one_at_a_time:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for program in programs:
                program()
        torch.cuda.current_stream(device).wait_stream(side)
        graphs: list[torch.cuda.CUDAGraph] = []
        for program in programs:
            graph = torch.cuda.CUDAGraph()
            pool = graphs[0].pool() if graphs else None
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                program()
            graphs.append(graph)
    return [graph.replay for graph in graphs]


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that this thread launches on; None without CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def copy_in(tensor: Tensor, values: Sequence[Any]) -> None:
    """Whole numbers from the host into a tensor, without waiting for the device."""
    source = torch.tensor(values, dtype=torch.int64, pin_memory=tensor.is_cuda)
    tensor.copy_(source, non_blocking=True)
