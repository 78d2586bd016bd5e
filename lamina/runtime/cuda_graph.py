"""CUDA graphs: capturing programs of kernels, and copying values into the tensors that a graph reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

Program = Callable[[], object]

_one_at_a_time = Lock()  # CUDA allows one capture at a time per process


def capture_graphs(device: torch.device, *programs: Program) -> list[Program]:
    """Captures each program in a CUDA graph. -> functions that replay them

    The graphs share a memory pool: a program may read tensors that an earlier one allocated. The programs are run twice
    first, in order, so kernels are built and loaded, workspaces are allocated, and a launch that fails raises here. The
    caller makes sure that these runs change nothing. Other threads may launch kernels, and load those of another model,
    during the capture.
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
    """The stream on which this thread launches; None without CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def copy_in(tensor: Tensor, values: Sequence[Any]) -> None:
    """Copies integers from the host into a tensor, without a synchronization."""
    source = torch.tensor(values, dtype=torch.int64, pin_memory=tensor.is_cuda)
    tensor.copy_(source, non_blocking=True)
