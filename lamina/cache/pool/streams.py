"""The CUDA streams that use one pool: who gets a page waits for work on it that other streams have queued.

Threads may run passes over one pool on streams of their own. Books are kept on the host under a lock, but what a stream
has queued runs later. Where a page changes hands, and where pages move, streams therefore wait for each other; the host
does not wait. With one stream, or on a CPU, nothing is done.
"""

from __future__ import annotations

import torch


class Streams:
    """The streams that were seen so far. The caller holds the pool's lock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen: list[torch.cuda.Stream] = []

    def note(self) -> None:
        """The current stream uses the pool."""
        if self.device.type == "cuda":
            current = torch.cuda.current_stream(self.device)
            if current not in self.seen:
                self.seen.append(current)

    def wait_for_others(self) -> None:
        """What the current stream does from now on comes after all that others have queued."""
        for current, other in self._pairs():
            current.wait_stream(other)

    def hold_others(self) -> None:
        """What others do from now on comes after all that the current stream has queued."""
        for current, other in self._pairs():
            other.wait_stream(current)

    def _pairs(self) -> list[tuple[torch.cuda.Stream, torch.cuda.Stream]]:
        if len(self.seen) < 2:
            return []
        current = torch.cuda.current_stream(self.device)
        return [(current, other) for other in self.seen if other != current]
