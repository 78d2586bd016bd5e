"""How many bytes can be allocated on a device now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

CGROUPS = (  # limit, usage, and the file with the part of it that is only cached files: of version 2, and of version 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on this device now; None where that cannot be found out.

    On a GPU: what the driver has, and what PyTorch's allocator has reserved and does not use. On a CPU: the available
    memory of the machine, or of the container (cgroup) if that is less.

    >>> free_memory(torch.device("meta")) is None
    True
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + max(unused, 0)
    if device.type == "cpu":
        return available_memory()
    return None


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that a process can still use, by Linux's own count; None on other systems."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, usage, stat, cached in CGROUPS:
        with suppress(OSError, ValueError, IndexError):  # "max" is no number: no limit
            folder = root / "sys/fs/cgroup"
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            lines = (folder / stat).read_text().splitlines()
            found.append(left + sum(int(line.split()[1]) for line in lines if line.split()[0] == cached))
    return max(min(found), 0) if found else None
