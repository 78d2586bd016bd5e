"""How a program of kernels becomes a CUDA graph, and how numbers from the host reach it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def recorded(*programs: Callable[[], object]) -> list[torch.cuda.CUDAGraph]:
    """A graph for each program; what one of them leaves in its memory, the following may read.

    They are run first, in their order and twice, so that kernels are built and scratch stores made: whoever calls takes
    care that this changes nothing. Other threads may go on meanwhile, as those do that load kernels for another model.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for program in programs:
                program()
    torch.cuda.current_stream().wait_stream(stream)
    graphs: list[torch.cuda.CUDAGraph] = []
    for program in programs:
        graph = torch.cuda.CUDAGraph()
        pool = graphs[0].pool() if graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            program()
        graphs.append(graph)
    return graphs


def copy_in(tensor: Tensor, numbers: Sequence[Any]) -> None:
    """Whole numbers from the host into a tensor, without waiting for the device."""
    source = torch.tensor(numbers, dtype=torch.int64, pin_memory=tensor.is_cuda)
    tensor.copy_(source, non_blocking=True)
