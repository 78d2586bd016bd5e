"""CUDA graphs: capturing programs of kernels, and copying values into the tensors that a graph reads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

Program = Callable[[], object]

_one_at_a_time = Lock()  # CUDA allows one capture at a time per process


def capture_graphs(device: torch.device, *programs: Program, pool: Any = None) -> list[Program]:
    """Captures each program in a CUDA graph. -> functions that replay them

    The graphs share a memory pool: a program may read tensors that an earlier one allocated. pool: that of graphs which
    were captured before (`torch.cuda.graph_pool_handle`), and never run at the same time. The programs are run once
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
        # cuBLAS has a workspace per stream. One that is made during a capture is in the memory of the graph, so that no
        # other graph, which may run at the same time, has the same; afterwards nobody else may get it.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            for program in programs:
                graph = torch.cuda.CUDAGraph()
                if pool is None and graphs:
                    pool = graphs[0].pool()
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    program()
                graphs.append(graph)
        finally:
            torch._C._cuda_clearCublasWorkspaces()
    return [graph.replay for graph in graphs]


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which this thread launches; None without CUDA."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def copy_in(tensor: Tensor, values: Iterable[int]) -> None:
    """Copies integers from the host into a contiguous tensor, in its order, without a synchronization."""
    if tensor.numel() == 0:
        return
    source = torch.frombuffer(array("q", values), dtype=torch.int64)  # a fifth of the time of `torch.tensor`
    source = source.pin_memory() if tensor.is_cuda else source
    tensor.copy_(source.view(tensor.shape), non_blocking=True)
