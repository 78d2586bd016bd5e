"""The paths: ways of feeding rows to a transformers model over a cache that must change nothing.

decode                 a prompt, then one token at a time; and one token at a time from the start
two chunks             a prompt in two passes
chunks                 passes of any size
padded                 rows of different lengths, padded on the left, with attention_mask: a prompt, then single tokens.
                       Rows of an encoder–decoder model have sources of different lengths instead
padded with positions  the same with position_ids as `generate` makes them
continued              after that several new tokens in one pass with the whole mask, and single tokens again
continued ragged       the same with another number of new tokens in each row, so that there is padding between tokens
right-padded           rows of different lengths, padded on the right, in one pass without a cache
crop                   drafts of which the last tokens are taken back by `cache.crop`, as assisted decoding does
reorder                rows replaced by others with `cache.reorder_cache`, as beam search does
rows                   rows repeated and selected with `batch_repeat_interleave` and `batch_select_indices`
generate               `model.generate`, greedy, on a padded batch
generate continued     `model.generate` again with all tokens so far, new ones, and the cache of the first time
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from lamina.checking.transformers.caches import NotTried
from lamina.checking.transformers.generated import generate, generate_continued
from lamina.checking.transformers.probe import Probe, Run

Path = Callable[[Probe, random.Random], None]


def decode(probe: Probe, rng: random.Random) -> None:
    for sequence, prompt in ((0, len(probe.rows[0]) // 2), (len(probe.rows) - 1, 1)):
        _cut(probe, sequence, [prompt] + [1] * (len(probe.rows[sequence]) - prompt))


def two_chunks(probe: Probe, rng: random.Random) -> None:
    for _ in range(probe.tries):
        cut = rng.randint(2, len(probe.rows[0]) - 2)
        _cut(probe, 0, [cut, len(probe.rows[0]) - cut])


def chunks(probe: Probe, rng: random.Random) -> None:
    for _ in range(probe.tries):
        left, sizes = len(probe.rows[0]), [2]
        while sum(sizes) < left:
            sizes.append(min(rng.choice([1, 2, 3, 5, 9]), left - sum(sizes)))
        _cut(probe, 0, sizes)


def padded(probe: Probe, rng: random.Random, positioned: bool = False) -> None:
    run, tail = _prompts(probe, positioned)
    while tail:
        tail = _next(run, tail, 1)


def padded_with_positions(probe: Probe, rng: random.Random) -> None:
    padded(probe, rng, positioned=True)


def continued(probe: Probe, rng: random.Random) -> None:
    run, tail = _prompts(probe, probe.subject.positions_name is not None)
    tail = _next(run, tail, 1)
    tail = _next(run, tail, max(1, tail - 1))
    while tail:
        tail = _next(run, tail, 1)


def continued_ragged(probe: Probe, rng: random.Random) -> None:
    if probe.subject.encoder_decoder:
        raise NotTried("rows of an encoder–decoder model begin alike")
    run = _batch(probe, probe.subject.positions_name is not None)
    cuts = [len(row) // 2 for row in probe.rows]
    run.feed([row[:cut] for row, cut in zip(probe.rows, cuts, strict=True)])
    run.feed([row[cut : cut + 1] for row, cut in zip(probe.rows, cuts, strict=True)])
    run.feed([row[cut + 1 : -1] for row, cut in zip(probe.rows, cuts, strict=True)])
    run.feed([row[-1:] for row in probe.rows])


def right_padded(probe: Probe, rng: random.Random) -> None:
    subject, truth = probe.subject, probe.truth
    if subject.encoder_decoder or subject.mask_name is None:
        raise NotTried("its forward takes no attention_mask for these rows")
    ids = torch.nn.utils.rnn.pad_sequence(truth.ids, batch_first=True, padding_value=subject.pad)
    mask = torch.zeros_like(ids)
    for r, row in enumerate(probe.rows):
        mask[r, : len(row)] = 1
    with truth.recorder.on():
        logits = subject.uncached(ids, mask=mask.to(subject.device))
    (one,) = truth.recorder.take()
    tokens = [r * ids.shape[1] + t for r, row in enumerate(probe.rows) for t in range(len(row))]
    probe.found[0].add(one, logits.flatten(0, 1), tokens, [place for row in probe.rows for place in row])
    probe.cases += len(probe.rows)


def crop(probe: Probe, rng: random.Random) -> None:
    row, strange = probe.rows[0], probe.rows[1]
    run, at = probe.run([0]), len(probe.rows[0]) // 2
    run.feed([row[:at]])
    if not getattr(run.cache, "is_croppable", hasattr(run.cache, "crop")):
        raise NotTried("the cache says that it cannot be cropped")
    if hasattr(run.cache, "activate_past_recording"):
        run.cache.activate_past_recording()
    while at < len(row):
        right, wrong = min(rng.randint(1, 3), len(row) - at), rng.randint(0, 3)
        run.feed([[*row[at : at + right], *rng.choices(strange, k=wrong)]], judged=right)
        run.crop(wrong)
        at += right


def reorder(probe: Probe, rng: random.Random) -> None:
    run, most = probe.run(range(len(probe.rows))), min(len(row) for row in probe.rows)
    at = most // 2
    _same(run, 0, at)
    for t in range(at, most):
        run.reorder("reorder_cache", [rng.randrange(len(run.sequences)) for _ in run.sequences])
        _same(run, t, t + 1)


def rows(probe: Probe, rng: random.Random) -> None:
    run, most = probe.run(range(len(probe.rows))), min(len(row) for row in probe.rows)
    at = most // 2
    _same(run, 0, at)
    run.repeat(2)
    _same(run, at, at + 1)
    run.reorder("batch_select_indices", [rng.randrange(len(run.sequences)) for _ in probe.rows])
    for t in range(at + 1, most):
        _same(run, t, t + 1)


UNCACHED = "without a cache"
WITHOUT = {"right-padded"}  # paths that use no cache
ASKED = {"continued ragged"}  # paths that are tried when asked for by name: windows and states count padding there
SERVED = {"crop": {"own", "lamina"}, "rows": {"own", "lamina"}}
"""Kinds of caches that have the verbs of a path; all have those of the others."""

PATHS: dict[str, Path] = {
    "decode": decode,
    "two chunks": two_chunks,
    "chunks": chunks,
    "padded": padded,
    "padded with positions": padded_with_positions,
    "continued": continued,
    "continued ragged": continued_ragged,
    "right-padded": right_padded,
    "crop": crop,
    "reorder": reorder,
    "rows": rows,
    "generate": generate,
    "generate continued": generate_continued,
}


def _cut(probe: Probe, sequence: int, sizes: list[int]) -> None:
    """One row in passes of these sizes."""
    run, at = probe.run([sequence]), 0
    for size in sizes:
        run.feed([probe.rows[sequence][at : at + size]])
        at += size


def _batch(probe: Probe, positioned: bool) -> Run:
    return probe.run(range(len(probe.rows)), masked=True, positioned=positioned)


def _prompts(probe: Probe, positioned: bool) -> tuple[Run, int]:
    """All rows but their last tokens, as many in each: -> how many those are. Rows with sources are equally long."""
    run, shortest = _batch(probe, positioned), min(len(row) for row in probe.rows)
    tail = min(max(4, shortest // 2), shortest - 1)
    if probe.subject.encoder_decoder:
        _same(run, 0, shortest - tail)
    else:
        run.feed([row[: len(row) - tail] for row in probe.rows])
    return run, tail


def _next(run: Run, tail: int, tokens: int) -> int:
    """The next tokens of every row, of which `tail` are left."""
    ends = [len(run.probe.rows[s]) for s in run.sequences]
    if run.probe.subject.encoder_decoder:
        ends = [min(ends)] * len(ends)
    run.feed([run.probe.rows[s][end - tail : end - tail + tokens] for s, end in zip(run.sequences, ends, strict=True)])
    return max(0, tail - tokens)


def _same(run: Run, start: int, stop: int) -> None:
    """The same positions of every row."""
    run.feed([run.probe.rows[s][start:stop] for s in run.sequences])
