"""The CUDA streams that use one pool: before a stream writes a page, it waits for the work of others on that page.

Threads may run passes over one pool, each on its own stream. Page tables are updated on the host under a lock, but work
that a stream has queued runs later. So streams wait for each other whenever a page changes hands or pages move; the
host does not wait. With one stream, or on a CPU, nothing is done.
"""

from __future__ import annotations

import torch


class Streams:
    """The streams that have used the pool. Callers hold the pool's lock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: list[torch.cuda.Stream] = []

    def add_current(self) -> None:
        """Records that the current stream uses the pool."""
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            if current not in self.seen:
                self.seen.append(current)

    def wait_for_others(self) -> None:
        """The current stream waits for the work that the others have queued."""
        for current, other in self._pairs():
            current.wait_stream(other)

    def hold_others(self) -> None:
        """The other streams wait for the work that the current one has queued."""
        for current, other in self._pairs():
            other.wait_stream(current)

    def _pairs(self) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        if len(self.seen) < 2:
            return []
        current = torch.cuda.current_stream(self.device)
        return [(current, other) for other in self.seen if other != current]
