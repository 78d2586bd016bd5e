"""`generate`: one prefill over ragged rows, then one token a pass for the rows that go on (see greedy.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.errors import InputError
from lamina.generation.greedy import captured, plainly
from lamina.generation.prompt import Prompt, prompt_of
from lamina.generation.result import Result, Timing
from lamina.runtime.capture import MOST_ENDS
from lamina.runtime.explain import why_not_captured

if TYPE_CHECKING:
    from lamina.model import Model

Stream = Callable[[int, int, str], None]


def generate(
    model: Model,
    prompts: Any,
    max_new_tokens: int = 20,
    *,
    attention_mask: Tensor | None = None,
    cache: Cache | None = None,
    eos: int | Iterable[int] | None = None,
    stream: Stream | None = None,
) -> Result:
    """Continues each prompt greedily until it ends or `max_new_tokens` are made.

    prompts         text, a list of texts, a list of id lists, or a tensor of ids; a source for encoder–decoder models
    attention_mask  of a tensor: 1 where an id is real; padding on the left or the right
    cache           continues its rows, one prompt each, with only the tokens that it does not hold yet
    eos             ids that end a row; the checkpoint's own when None
    stream          called as stream(row, token, text) for each new token; text is always whole characters

    >>> result = model.generate([[1, 2, 3], [4]], max_new_tokens=5)   # doctest: +SKIP
    >>> result.tokens, result.reasons                                 # doctest: +SKIP
    """
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    prompt, cache = _begin(model, prompts, attention_mask, cache)
    ends = set(model.eos_ids if eos is None else [eos] if isinstance(eos, int) else eos)
    lengths = cache.clock.sync()
    cache.reserve(max(a + b for a, b in zip(lengths, prompt.counts, strict=True)) + max_new_tokens)
    texts = [model.tokenizer.stream() for _ in prompt.counts] if stream and model.tokenizer else None

    def told(row: int, token: int, last: bool) -> None:
        assert stream is not None
        piece = texts[row].put(token) + (texts[row].end() if last else "") if texts else ""
        stream(row, token, piece)

    with torch.no_grad():
        started = time.perf_counter()
        logits = _prefill(model, prompt, cache)
        prefilled = time.perf_counter()
        decode = captured if why_not_captured(model, cache) is None and len(ends) <= MOST_ENDS else plainly
        tokens = decode(model, cache, logits, max_new_tokens, ends, told if stream else None)
        finished = time.perf_counter()

    reasons = ["eos" if row[-1] in ends else "length" for row in tokens]
    made = sum(len(row) for row in tokens)
    timing = Timing(sum(prompt.counts), prefilled - started, made, finished - prefilled)
    return Result(prompt.rows, tokens, reasons, cache, model.tokenizer, min(ends, default=0), timing)


def _begin(model: Model, prompts: Any, attention_mask: Tensor | None, cache: Cache | None) -> tuple[Prompt, Cache]:
    """The decoder's prompt and the cache it goes to."""
    prompt = prompt_of(model, prompts, attention_mask)
    rows = len(prompt.counts)
    if cache is not None and cache.rows != rows:
        raise InputError(f"{rows} prompts were given, the cache has {cache.rows} rows")
    if prompt.source is None:
        return prompt, cache if cache is not None else model.new_cache(rows)
    source = model.encode(prompt.source.ids, prompt.source.counts, prompt.source.embeds)
    return prompt, model.new_cache(rows, source=source) if cache is None else cache.attach(source)


def _prefill(model: Model, prompt: Prompt, cache: Cache) -> Tensor:
    even = len(set(prompt.counts)) == 1
    counts = None if even else prompt.counts
    logits = model(prompt.ids, embeds=prompt.embeds, cache=cache, counts=counts, logits="last")
    assert logits is not None
    return logits
