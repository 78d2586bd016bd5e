"""A progress bar for what takes a while: on a terminal only, and only once it does."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

SHOW_AFTER = 1.0  # seconds


class Bar:
    """Counts bytes or something else; shows itself on standard error once `SHOW_AFTER` seconds have passed."""

    def __init__(self, what: str, total: int, unit: str = "bytes", wanted: bool = True) -> None:
        self._what, self._unit = what, unit
        self._total, self._done = total, 0
        self._wanted = wanted and sys.stderr.isatty()
        self._begin = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def shown(self) -> bool:
        return self._bar is not None

    def advance(self, more: int) -> None:
        self._done += more
        if self._bar is None and self._wanted and time.monotonic() - self._begin > SHOW_AFTER:
            self._bar = self._show()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)

    def _show(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        count = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn(self._what), BarColumn(), count, TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task("", total=self._total)
        bar.start()
        return bar
