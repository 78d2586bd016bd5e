"""`PromptReader`: feeds short prompts to a cache by captured graphs (`lamina.runtime.prompts`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from lamina.cache.cache import Cache
from lamina.errors import CaptureError
from lamina.generation.prefill.scorer import Scorer
from lamina.generation.prompt import Prompt
from lamina.notices import notice
from lamina.runtime.prompts.captured_prompt import CapturedPrompt, widths_for
from lamina.runtime.prompts.eligibility import why_no_prompts

if TYPE_CHECKING:
    from lamina.model import Model

ALWAYS = 512  # tokens with padding that a captured prompt reads faster than a plain pass reads few


class PromptReader:
    """Reads prompts by captured graphs, where they are short and a graph of their size is worth capturing.

    reason   why the last prompt that was given to `feed` was not read; None on a CPU, where `model.explain()` says it
    """

    def __init__(self, model: Model, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.reason: str | None = None
        self._never = why_no_prompts(model, cache)
        self._no_graphs = self._never is not None and model.device.type == "cpu"
        self._one: CapturedPrompt | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._one is not None:
            self._one.release()
            self._one = None

    def feed(self, prompt: Prompt, start: int, counts: Sequence[int], scorer: Scorer | None = None) -> bool:
        """Feeds and commits counts[row] tokens of each row, from `start` on, and lets `scorer` score them. -> False if
        a plain pass must do it"""
        if self._no_graphs:
            return False
        tokens, states = max(counts), scorer is not None
        self.reason = self._never or self._why_not_now(tokens, counts)
        if self.reason is not None:
            return False
        ids, embeds = (None if x is None else x[:, start : start + tokens] for x in (prompt.ids, prompt.embeds))
        try:
            if self._one is None:
                self._one = self.model.graphs.prompt_of(self.cache.rows, self.cache)
            if not self._one.wants(tokens, embedded=embeds is not None, states=states):
                self.reason = "a prompt of this size is captured when another one comes"
                return False
            left = self._one.feed(self.cache, ids, counts, embeds=embeds, states=states)
        except CaptureError as problem:  # raised before any token is fed
            self.reason = str(problem)
            if self._one is not None or self.model.graphs.why_no_prompt(self.cache.rows):  # else others use the graphs
                self._never = self.reason
                notice(f"reading prompts by plain passes, since {self.reason}", unexpected=True)
            return False
        if scorer is not None and left is not None:
            scorer.add(left, counts)
        return True

    def _why_not_now(self, tokens: int, counts: Sequence[int]) -> str | None:
        rows = self.cache.rows
        width = next((width for width in widths_for(rows) if tokens <= width), None)
        if width is None:
            most = max(widths_for(rows))
            return f"rows of up to {tokens} tokens; captured prompts of {rows} rows have up to {most} per row"
        if rows * width > max(ALWAYS, 2 * sum(counts)):
            return f"{sum(counts)} tokens in {rows} rows of up to {tokens}: most of a captured prompt would be padding"
        return None
