"""The launch configuration of an attention kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """Tokens per iteration of the kernel's loop, warps per program, and pipeline stages of the loop's loads."""

    block: int
    warps: int
    stages: int
