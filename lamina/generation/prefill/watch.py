"""`Watch`: what a call wants to know of its prefill while it runs, and what the prefill did.

Between two chunks the cache is valid and holds the chunks so far. So whatever is raised there (Ctrl-C, an error of the
caller's `progress`, a cancelled stream) leaves a cache that can be continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lamina.attention.core import Calls

if TYPE_CHECKING:
    from lamina.generation.prefill.scorer import Scorer

Progress = Callable[[int, int], object]
"""progress(done, total): tokens of the prompts that were fed, of all rows together; called after each pass."""


@dataclass
class Watch:
    """What happens between the passes of a prefill.

    progress   the caller's function
    check      raises if the caller has lost interest (a cancelled stream)
    scorer     records log-probabilities of the tokens that are fed
    passes     how many passes were run; captured: of these as captured graphs; packed: without padding
    reason     why the last plain pass was not captured
    chunk      the most tokens of a row in one pass
    ways       how attention was run -> calls
    """

    progress: Progress | None = None
    check: Callable[[], object] | None = None
    scorer: Scorer | None = None
    passes: int = 0
    captured: int = 0
    packed: int = 0
    reason: str | None = None
    chunk: int = 0
    ways: Calls = field(default_factory=dict)

    def between(self, done: int, total: int) -> None:
        """Called after each pass."""
        if self.progress is not None:
            self.progress(done, total)
        if self.check is not None and done < total:
            self.check()

    @property
    def how(self) -> str:
        """In words, for `Result.prompt_how`.

        >>> from lamina.attention.core import Way
        >>> Watch(passes=3, packed=3, chunk=2048, ways={Way("sdpa", "full", (), 64): 90}).how
        '3 packed passes of up to 2,048 tokens a row; attention: sdpa'
        >>> Watch(passes=1, captured=1, chunk=300).how
        'one captured graph of up to 300 tokens a row'
        """
        if not self.passes:
            return "nothing was fed: the cache held every token"
        plain, kind = self.passes - self.captured, ""
        if self.packed:
            kind = "packed " if self.packed == plain else f"({self.packed} packed) "
        names = (self.captured, "captured graph", "captured graphs"), (plain, f"{kind}pass", f"{kind}passes")
        said = " and ".join(f"one {name}" if n == 1 else f"{n} {many}" for n, name, many in names if n)
        said += f" of up to {self.chunk:,} token{'s' * (self.chunk != 1)} a row"
        if plain and self.reason is not None:
            said += f"; not captured, since {self.reason}"
        backends = sorted({way.backend for way in self.ways})
        return f"{said}; attention: {', '.join(backends)}" if backends else said
