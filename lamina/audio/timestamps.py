"""Timestamps in Whisper's output: the rules that tokens follow while they are decoded, and the segments they mark.

A timestamp is a token: `first + n` is n · 0.02 seconds after the start of the window. A segment of text stands between
two of them: <0.00> text <2.40> <2.40> text <5.00>.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lamina.sampling.history import History

SECONDS, FRAMES = 0.02, 2
"""One timestamp step: seconds, and frames of the spectrogram."""


@dataclass(frozen=True)
class TimestampRules:
    """A processor: which tokens may come next when timestamps are decoded.

    - The first new token is a timestamp, at most `first + latest`.
    - Timestamps come in pairs (an end and the next start), except before the end token, and never decrease.
    - If all timestamps together are likelier than any other token, it is a timestamp.
    """

    first: int
    """Id of the timestamp 0.00; the id before it is <|notimestamps|>."""
    end: int
    """Id that ends a row: ids below it are text."""
    latest: int | None = None
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "all"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        new, vocab = history.lengths - history.prompts, scores.shape[-1]  # new [B]
        vocabulary = torch.arange(vocab, device=scores.device)
        is_time = vocabulary >= self.first
        before, last = history.tail(2).unbind(dim=1)
        last_time = (new >= 1) & (last >= self.first)
        before_time = (new < 2) | (before >= self.first)
        opens, closes = last_time & before_time, last_time & ~before_time

        made = history.seen(vocab) > history.seen_in_prompt(vocab)  # [B, V]
        newest = torch.where(made & is_time, vocabulary, -1).amax(dim=1)  # never decreasing, so the newest
        least = torch.where(newest < 0, self.first, newest + (~closes).long())
        banned = (vocabulary == self.first - 1) | (is_time & (vocabulary < least[:, None]))
        banned = banned | (opens[:, None] & is_time) | (closes[:, None] & (vocabulary < self.end))
        begins = ~is_time if self.latest is None else ~is_time | (vocabulary > self.first + self.latest)
        scores = torch.where(banned | ((new == 0)[:, None] & begins), -torch.inf, scores)

        together = scores[:, self.first :].logsumexp(dim=-1)
        likelier = together > scores[:, : self.first].amax(dim=-1)
        return torch.where(likelier[:, None] & ~is_time, -torch.inf, scores)


class Span(NamedTuple):
    """A segment of one window, in seconds from the start of the window."""

    start: float
    end: float
    tokens: list[int]


def spans_of(tokens: Sequence[int], frames: int, first: int) -> tuple[list[Span], int]:
    """The segments of a window of `frames` frames, and after how many frames the next window begins.

    tokens   new ids without the end token
    first    id of the timestamp 0.00

    A window that ends in the middle of a segment (its last timestamps are a pair) is cut at that pair; text after it is
    dropped, since the next window has it. Otherwise the whole window is done.

    >>> spans_of([100, 7, 8, 105, 105, 9], frames=50, first=100)
    ([Span(start=0.0, end=0.1, tokens=[100, 7, 8, 105, 105])], 10)
    """
    tokens = list(tokens)
    times = [token >= first for token in tokens]
    pairs = [i + 1 for i in range(len(tokens) - 1) if times[i] and times[i + 1]]
    if not pairs:
        marks = [token for token, is_time in zip(tokens, times, strict=True) if is_time]
        last = marks[-1] - first if marks and marks[-1] != first else frames // FRAMES
        return [Span(0.0, last * SECONDS, tokens)], frames
    ends_once = times[-2:] == [False, True]
    cuts = [*pairs, len(tokens)] if ends_once else [*pairs[:-1], pairs[-1] + 1]
    spans, start = [], 0
    for cut in cuts:
        part = tokens[start:cut]
        end = part[-1] if ends_once or cut != cuts[-1] else part[-2]
        spans.append(Span((part[0] - first) * SECONDS, (end - first) * SECONDS, part))
        start = cut
    return spans, frames if ends_once else (tokens[start - 2] - first) * FRAMES
