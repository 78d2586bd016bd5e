"""`model.explain()`: how tokens are decoded; and how prompts are run: attention for each kind of layer, recurrences,
packing, and chunks.

A small prompt is run, and what it did is told. Sizes that go another way (cuDNN) are told from the rules.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from lamina import kernels
from lamina.attention.core import Calls, Way, noted
from lamina.cache.cache import Cache
from lamina.cache.packed import LEAST_PADDING, LEAST_SHARE
from lamina.cache.spec import Convolution, Recurrent
from lamina.rehearsal.cost import pass_cost
from lamina.rehearsal.free_memory import free_memory
from lamina.runtime.eligibility import how_packed, why_no_step, why_not_captured
from lamina.runtime.feed import feed, why_not_packed
from lamina.runtime.prefill import attention as prefill_attention
from lamina.runtime.prefill.backend import kernel_of
from lamina.runtime.prompts.captured_prompt import widths_for
from lamina.runtime.prompts.eligibility import why_no_prompts

if TYPE_CHECKING:
    from lamina.model import Model

TOKENS = 32  # of the prompt that is run


def explain_decoding(model: Model, cache: Cache | None = None, rows: int = 1) -> str:
    """How tokens are decoded, and the reason if decode steps are not captured."""
    graphs, rows = model.graphs, rows if cache is None else cache.rows
    reason, kind = why_not_captured(model, cache, rows), "one captured graph a step"
    if reason is not None and model.device.type == "cpu":
        reason, kind = why_no_step(model, cache, reason, rows) or graphs.why_not(rows), "one native program a step"
    elif reason is None:
        reason = graphs.why_not(rows) or graphs.why_refused()
    how = f"decoding: {kind}" if reason is None else f"decoding: plain passes, since {reason}"
    return how if (packed := how_packed(model)) is None else f"{how}\npacked weights: {packed}"


def explain_prompts(model: Model, cache: Cache | None = None, rows: int = 1, share: float = 1.0) -> list[str]:
    """One line for each part. share: of the free memory that a pass may take"""
    reason = why_no_kernels(model)
    between = "kernels between products" if reason is None else f"PyTorch operations, since {reason}"
    lines = [f"prompts: {between}"]
    if reason is None:
        lines.append(f"  short ones: {short_prompts(model, cache, rows if cache is None else cache.rows)}")
    lines += [f"  {line}" for line in (*attention_lines(model, reason), *recurrence_lines(model, reason))]
    packed = why_not_packed(model)
    how = f"packed, from {LEAST_PADDING} tokens and {LEAST_SHARE:.1%} of padding on"
    lines.append("  ragged rows: " + (how if packed is None else f"padded, since {packed}"))
    return [*lines, f"  chunks: {chunk_line(model, cache, share)}"]


def short_prompts(model: Model, cache: Cache | None, rows: int) -> str:
    """Up to which length prompts are captured, or why they are not."""
    if unread := why_no_prompts(model, cache, rows) or model.graphs.why_no_prompt(rows):
        return f"plain passes, since {unread}"
    most = f"up to {max(widths_for(rows))} tokens{' per row' if rows > 1 else ''}"
    return f"one captured graph for {most}, once its size was asked for twice"


def why_no_kernels(model: Model) -> str | None:
    """Why prompts are not run by kernels; None if they are."""
    first = next(model.parameters(), None)
    if first is None or not first.is_cuda:
        return f"the model is on {'cpu' if first is None else first.device.type}"
    return kernels.why_not(first)


def attention_lines(model: Model, no_kernels: str | None) -> list[str]:
    """How each kind of attention runs in a prompt, and why."""
    if model.start_ids:
        return ["attention: not tried, since the model reads a source"]
    calls: Calls = {}
    tokens = min(TOKENS, model.max_positions or TOKENS)
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    try:
        with torch.no_grad(), noted(calls):
            feed(model, model.new_cache(), ids)
    except Exception as error:  # a block of one's own may fail on these ids
        return [f"attention: not known: a prompt of {tokens} tokens failed with {type(error).__name__}: {error}"]
    return [attention_line(way, count, no_kernels) for way, count in calls.items()]


def attention_line(way: Way, count: int, no_kernels: str | None) -> str:
    """
    >>> attention_line(Way("eager", "full", ("softcap",), 256), 21, "the model is on cpu")
    'attention, full, heads of 256 (21 layers): eager, since softcap changes scores and the model is on cpu'
    """
    layers = f"{count} layer{'s' * (count != 1)}"
    changes = " and ".join(way.changed)
    return f"attention, {way.window}, heads of {way.dim} ({layers}): {_why(way, changes, no_kernels)}"


def _why(way: Way, changes: str, no_kernels: str | None) -> str:
    plain = not way.changed and way.window == "full"
    match way.backend:
        case "kernel" if plain:
            least = prefill_attention.LEAST
            return f"kernel; cuDNN for chunks of {least} tokens or more, once they have paid for its planning"
        case "kernel":
            return f"kernel, which applies {changes or 'the window'} itself"
        case "split-KV kernel":
            return "split-KV kernel, since there are few queries over many keys"
        case "kernel over mask bits":
            return "kernel over mask bits, since positions alone do not decide what is seen"
        case "sdpa in turns" | "eager in turns":
            return f"{way.backend} over queries, since no kernel takes this call and its mask or scores would be large"
        case "eager" if changes:
            return f"eager, since {changes} change{'s' * (' ' not in changes)} scores" + (
                f" and {no_kernels}" if no_kernels else ", and no kernel takes this call"
            )
        case "sdpa" if no_kernels is None:
            return "sdpa, since no kernel takes this call"
    return way.backend


def recurrence_lines(model: Model, no_kernels: str | None) -> list[str]:
    """How recurrences and convolutions run in a prompt."""
    specs = [spec for entry in model.specs for spec in entry.values()]
    rules = Counter(spec.rule for spec in specs if isinstance(spec, Recurrent))
    lines = []
    for rule, count in rules.items():
        why = no_kernels or (None if kernel_of(rule) else f"there is no kernel for {type(rule).__name__}")
        lines.append(f"{type(rule).__name__} ({count} layers): {'chunked kernel' if why is None else _torch(why)}")
    if convolutions := sum(isinstance(spec, Convolution) for spec in specs):
        lines.append(f"convolution ({convolutions} layers): {_torch(no_kernels) if no_kernels else 'kernel'}")
    return lines


def _torch(why: str) -> str:
    return f"PyTorch, since {why}"


def chunk_line(model: Model, cache: Cache | None, share: float) -> str:
    """How long a prompt of one row may be to be fed in one pass."""
    free = free_memory(model.device)
    cost = None if model.start_ids or free is None else pass_cost(model, model.new_cache() if cache is None else cache)
    if free is None or cost is None:
        return "none unless prefill_chunk is given: the memory of a pass is not known"
    tokens = 1
    while tokens < 1 << 40 and cost.nbytes(1, 2 * tokens, 2 * tokens) <= share * free:
        tokens *= 2
    return (
        f"a prompt of {tokens:,} tokens fits in one pass, with {free / 2**30:.1f} GiB free; longer ones are fed in "
        "chunks that fit"
    )
