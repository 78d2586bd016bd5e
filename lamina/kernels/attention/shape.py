"""How an attention kernel is launched: tokens a step of its loop, warps, and stages of loads on their way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """How the kernel is launched: tokens a step, and the loads kept in flight ahead of it."""

    block: int
    warps: int
    stages: int
