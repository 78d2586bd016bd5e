"""`score`: how likely given texts are: the log-probability of each token, given those before it.

    found = model.score(["The sky is blue.", "The sky is green."])
    found.sums, found.perplexity

Texts are fed like prompts: ragged rows, packed, in chunks that fit into memory, from a cache. The logits of all tokens
are never in memory at once (scorer.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.counts import check_ints
from lamina.errors import InputError
from lamina.generation.feed import prefill
from lamina.generation.prefill.scorer import Scorer
from lamina.generation.prefill.watch import Progress, Watch
from lamina.generation.prompt import Prompt, from_rows, prompt_of
from lamina.generation.result import Timing
from lamina.generation.settings.arguments import check_arguments

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.model import Model


@dataclass(repr=False)
class Score:
    """Log-probabilities of given tokens, one entry per text.

    A text's first token is scored only if its row of the cache held a token before.
    """

    tokens: list[list[int]]
    """The scored ids of each text."""
    logprobs: list[Tensor]
    """[n] float32 on the CPU: the natural logarithm of each scored token's probability."""
    top: list[list[tuple[tuple[int, float], ...]]]
    """For each scored token, the most likely ids there with their log-probabilities; with top=n."""
    cache: Cache
    """The cache that holds the texts."""
    how: str = ""
    """How the texts were fed: passes, packed or not, and which attention ran."""
    timing: Timing = field(default_factory=Timing)
    tokenizer: Tokenizer | None = None

    @property
    def sums(self) -> list[float]:
        """The log-probability of each text as a whole."""
        return [float(one.double().sum()) for one in self.logprobs]

    @property
    def perplexities(self) -> list[float]:
        """exp(- mean log-probability) of each text; NaN for a text without scored tokens."""
        return [perplexity(one) for one in self.logprobs]

    @property
    def perplexity(self) -> float:
        """The same over the tokens of all texts."""
        return perplexity(torch.cat(self.logprobs))

    def __repr__(self) -> str:
        """
        >>> Score([[5, 6]], [torch.tensor([-1.0, -0.5])], [[]], None)
        Score(1 text: 2 tokens, sum -1.5, perplexity 2.12)
        """
        texts = f"{len(self.tokens)} text{'s' * (len(self.tokens) != 1)}"
        count = sum(map(len, self.tokens))
        return f"Score({texts}: {count} tokens, sum {sum(self.sums):.5g}, perplexity {self.perplexity:.3g})"


def perplexity(logprobs: Tensor) -> float:
    """
    >>> round(perplexity(torch.tensor([0.5, 0.25]).log()), 3)
    2.828
    """
    return math.exp(-float(logprobs.double().mean())) if len(logprobs) else math.nan


class ScoreOptions(TypedDict, total=False):
    """Keyword arguments of `score`, for `model.score`."""

    cache: Cache | None
    start: int | Sequence[int]
    top: int
    attention_mask: Tensor | None
    decoder_input_ids: Any
    decoder_attention_mask: Tensor | None
    chat_options: Mapping[str, Any] | None
    prefill_chunk: int | None
    progress: Progress | None
    beyond_context: bool


@torch.no_grad()
def score(
    model: Model,
    texts: Any = None,
    *,
    cache: Cache | None = None,
    start: int | Sequence[int] = 0,
    top: int = 0,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Tensor | None = None,
    chat_options: Mapping[str, Any] | None = None,
    prefill_chunk: int | None = None,
    progress: Progress | None = None,
    beyond_context: bool = False,
) -> Score:
    """The log-probability of each token of the texts, given the tokens before it.

    texts            text, texts, ids, id lists, a tensor, a chat or chats. For encoder–decoder models: the source, and
                     decoder_input_ids are what is scored
    cache            the texts follow its rows, which then hold them too; a cache of one row serves any number of texts,
                     and stays as it is if they are several
    start            tokens of each text before this index are read and not scored: a number, or one for each text
    top              how many of the most likely tokens to return beside each token
    attention_mask   for a tensor: 1 for real tokens; padding on the left or the right
    prefill_chunk    the most tokens of a text in one pass; None: as many as fit into memory
    progress         called as progress(done, total) after each pass
    beyond_context   allows texts that are longer than the model's context

    >>> found = model.score(["The sky is blue.", "The sky is green."])        # doctest: +SKIP
    >>> found.logprobs[0], found.sums, found.perplexity                       # doctest: +SKIP
    >>> model.score([" Paris", " Rome"], cache=result.cache).sums             # doctest: +SKIP
    """
    began = time.perf_counter()
    check_arguments(
        model, dict(cache=cache, attention_mask=attention_mask, chat_options=chat_options, progress=progress)
    )
    for name, given, least in (("top", top, 0), ("prefill_chunk", prefill_chunk, 1)):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < least):
            raise InputError(f"{name}={given!r}: it must be a whole number from {least} on")
    held = () if cache is None else tuple(cache.clock.sync())
    prompt = prompt_of(
        model, texts, attention_mask, decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask, add_generation_prompt=False, chat_options=chat_options,
        held=held, whole=False,
    )  # fmt: skip
    if prompt.ids is not None:
        model.check_ids(prompt.ids, prompt.counts)
    starts = _starts(start, prompt.rows)
    with nullcontext() if cache is None else cache.used_alone():
        cache = _cache_of(model, cache, prompt, beyond_context)
        rows = _with_known_logits(cache, prompt.rows)
        added = [len(row) - n for row, n in zip(rows, prompt.counts, strict=True)]
        scorer = Scorer(model, rows, top, [n + more for n, more in zip(starts, added, strict=True)])
        watch = Watch(progress, scorer=scorer)
        if any(rows):
            prefill(model, from_rows(rows, allow_empty=True), cache, prefill_chunk, watch)
    own, ends = scorer.own.cpu(), scorer.counts
    known = [(~one[:end].isnan()).nonzero()[:, 0].tolist() for one, end in zip(own, ends, strict=True)]
    tops = [scorer.tops(r) for r in range(len(rows))]
    timing = Timing(sum(ends), time.perf_counter() - began, prompt_passes=watch.passes, prompt_chunk=watch.chunk)
    return Score(
        [[rows[r][i] for i in some] for r, some in enumerate(known)],
        [own[r, some] for r, some in enumerate(known)],
        [[tops[r][i] for i in some] if top else [] for r, some in enumerate(known)],
        cache, watch.how, timing, model.tokenizer,
    )  # fmt: skip


def _starts(start: int | Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
    starts = [start] * len(rows) if isinstance(start, int) else check_ints("start", start)
    if len(starts) != len(rows) or any(n < 0 for n in starts):
        raise InputError(f"start={start}: it must be an index from 0 on, or one for each of the {len(rows)} texts")
    return starts


def _cache_of(model: Model, cache: Cache | None, prompt: Prompt, beyond_context: bool) -> Cache:
    """The cache that the texts are fed to, with room for them."""
    rows, source = len(prompt.counts), prompt.source
    if cache is None:
        cache = model.new_cache(
            rows, source=None if source is None else model.encode(source.ids, source.counts, source.embeds)
        )
    elif source is not None:
        raise InputError("a source and a cache were given, and the cache holds its source: leave one out")
    elif cache.rows not in (1, rows):
        raise InputError(f"{rows} texts were given, the cache has {cache.rows} rows: give one for each row")
    elif cache.rows != rows:
        cache = cache.repeat(rows)
    lengths = [n + more for n, more in zip(cache.clock.sync(), prompt.counts, strict=True)]
    if model.context is not None and max(lengths) > model.context and not beyond_context:
        raise InputError(
            f"text {lengths.index(max(lengths))} makes a row of {max(lengths)} tokens, and the model was made for "
            f"{model.context}: give fewer, or beyond_context=True"
        )
    return cache.reserve(max(lengths))


def _with_known_logits(cache: Cache, rows: Sequence[list[int]]) -> list[list[int]]:
    """The rows to feed. Where the logits after a row's last token are not known (it was rewound, or fed without
    logits), that token is taken back and fed again."""
    held, logits = cache.clock.sync(), cache.logits
    known = [False] * cache.rows if logits is None else (~logits[:, 0].isnan()).tolist()
    back = [int(bool(rows[r]) and held[r] > 0 and not known[r]) for r in range(cache.rows)]
    if not any(back):
        return list(rows)
    possible, tokens = cache.rewindable.tolist(), cache.tokens
    for r, n in enumerate(back):
        if n > possible[r] or (n and tokens[r][-1] < 0):
            raise InputError(
                f"the logits after the last token of row {r} are not known, and that token cannot be fed again: make "
                "the cache with slack=1, or feed its last token with logits"
            )
    cache.rewind(back)
    return [tokens[r][-1:] * n + row for r, (n, row) in enumerate(zip(back, rows, strict=True))]
