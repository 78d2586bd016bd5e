"""Interrupts at a chosen place: KeyboardInterrupt at the k-th line that runs inside the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lamina

PACKAGE = str(Path(lamina.__file__).parent)


def _traced(run: Callable[[], object], each: Callable[[FrameType], None], within: str) -> None:
    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            each(frame)
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(PACKAGE + within) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)


def lines_of(run: Callable[[], object], within: str = "") -> list[tuple[str, int]]:
    """(file, line) of every line of the package, or of one folder of it, that runs: once each time."""
    found: list[tuple[str, int]] = []
    _traced(run, lambda frame: found.append((Path(frame.f_code.co_filename).name, frame.f_lineno)), within)
    return found


def interrupted(run: Callable[[], object], at: int, within: str = "") -> bool:
    """Runs it up to its line number `at`; whether it got as far."""
    passed = 0

    def stop(_: FrameType) -> None:
        nonlocal passed
        passed += 1
        if passed == at + 1:
            raise KeyboardInterrupt

    try:
        _traced(run, stop, within)
    except KeyboardInterrupt:
        return True
    return False
