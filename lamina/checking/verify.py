"""`lamina.verify`: runs the laws on a model with small random inputs.

The logits of every law are compared with an uncached pass over one row. What rounding may explain is measured, not
guessed: the uncached pass is also run with its blocks in double precision, and a cached pass may be off by twice what
the plain one is. Where a law fails, each block is run alone, cached, on the inputs it had in the uncached pass; the
first that differs by more than its own rounding is named, with row and position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.cache.cross import Source
from lamina.checking.laws import LAWS, Way
from lamina.checking.report import Difference, Report
from lamina.checking.subject import OneBlock, Subject, WholeModel
from lamina.errors import InputError
from lamina.model import Model

LONGEST = 96  # tokens a row, unless asked for more


@torch.no_grad()
def verify(
    model: Model,
    *,
    laws: Sequence[str] | None = None,
    rows: int = 3,
    length: int | None = None,
    tries: int = 2,
    seed: int = 0,
    residence: str = "device",
) -> Report:
    """Proves on this model that the cache changes nothing, or names where it does.

    length  tokens of the longest row; None goes past three times the largest window, as far as 96 tokens reach
    tries   how often each law is tried on each way of keeping, with other cuts each time
    residence   where the bytes of caches live, as in `model.new_cache`

    One line of pytest:

    >>> def test_my_model():                        # doctest: +SKIP
    ...     assert lamina.verify(model)
    """
    chosen = list(LAWS) if laws is None else list(laws)
    for law in chosen:
        if law not in LAWS:
            raise InputError(f"there is no law {law!r}; known: {', '.join(LAWS)}")
    notes: list[str] = []
    longest = _length(model, notes) if length is None else length
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, *(max(2, longest * (rows - r) // (rows + 1)) for r in range(1, rows))]
    ids = [torch.randint(0, model.vocab, (n,), generator=generator) for n in lengths]
    whole = WholeModel(model, ids, _sources(model, rows, generator), residence)
    slack = 3
    ways = [Way(None, slack), Way(longest, slack), Way(None, 0), Way(longest + 7, 0)]
    if model.max_positions is not None:
        ways = [Way(min(way.capacity or model.max_positions, model.max_positions), way.slack) for way in ways]

    cache = model.new_cache(residence=residence)
    kinds = list(dict.fromkeys(layer.kind for entry in cache.layers for layer in entry.values()))
    dtype = str(model.dtype).removeprefix("torch.")
    title = f"{type(model).__name__}: {len(model.blocks)} layers, {dtype} on {model.device}; rows of {lengths} tokens"
    title += ", kept on the host" if residence == "host" else ""
    report = Report(title, chosen, kinds, notes=notes)
    blocks: dict[int, OneBlock] = {}
    for law in chosen:
        for way in ways:
            if law == "rewind" and way.slack == 0:
                continue
            for attempt in range(tries):
                _try(report, whole, blocks, law, way, seed * 1000 + attempt)
    flips = sum(block.flips for block in blocks.values())
    if flips:
        notes.append(f"{flips} tokens at a near-tie went to other experts than without a cache; they were left out")
    order = {f"layer {i}": i for i in range(len(model.blocks))}
    report.differences.sort(key=lambda d: (order.get(d.where, len(order)), d.position, d.row))
    return report


def _try(report: Report, whole: WholeModel, blocks: dict[int, OneBlock], law: str, way: Way, seed: int) -> None:
    found, worst = _first_difference(whole, law, way, seed, steps=4.0)
    report.worst[law] = max(report.worst.get(law, 0.0), worst)
    if found is None:
        return
    named = []
    flips = 0
    for i in range(len(whole.model.blocks)):
        block = blocks.setdefault(i, OneBlock(whole, i))
        flips -= block.flips
        differs, _ = _first_difference(block, law, way, seed, steps=2.0)
        flips += block.flips
        if differs is not None:
            named.append(differs)
    if named or not flips:
        report.differences += named or [found]


def _first_difference(subject: Subject, law: str, way: Way, seed: int, steps: float) -> tuple[Difference | None, float]:
    """The first output off by more than `steps` times the plain pass's own rounding, and the largest error."""
    allowed = steps * max(_error(a, b).max().item() for a, b in zip(subject.truth, subject.exact, strict=True))
    allowed += _floor(subject.truth[0].dtype)
    first, worst = None, 0.0
    for sequence, start, out in LAWS[law](subject, way, random.Random(seed)):
        errors = _error(out, subject.exact[sequence][start : start + len(out)], of=subject.exact[sequence])
        if len(errors) == 0:
            continue
        worst = max(worst, float(errors.max()))
        over = (errors > allowed).nonzero()
        if len(over):
            at = int(over[0, 0])
            found = Difference(
                law, str(way), subject.name, subject.kinds, sequence, start + at, float(errors[at]), allowed
            )
            if first is None or (found.position, found.row) < (first.position, first.row):
                first = found
    return first, worst


def _error(found: Tensor, exact: Tensor, of: Tensor | None = None) -> Tensor:
    """[T, N] -> [T]: the largest deviation at each position, relative to the largest output; NaN counts as infinite."""
    scale = (exact if of is None else of).abs().max().clamp(min=1e-30)
    errors = (found.to(exact.dtype) - exact).abs().flatten(1).amax(dim=1) / scale
    return torch.where(errors.isfinite(), errors, torch.inf)


def _floor(dtype: torch.dtype) -> float:
    """What another order of summation may add where the plain pass happens to be nearly exact."""
    return max(4 * torch.finfo(dtype).eps, 4e-6)


def _length(model: Model, notes: list[str]) -> int:
    spans = [span for entry in model.specs for spec in entry.values() if (span := _span(spec)) is not None]
    wanted = max(24, *(3 * span + 8 for span in spans)) if spans else 24
    limit = min(LONGEST, model.max_positions or LONGEST)
    beyond = sorted({span for span in spans if span >= limit})
    if beyond:
        notes.append(f"windows of {beyond} tokens were not reached with {limit}; give length= to go past them")
    return min(wanted, limit)


def _span(spec: object) -> int | None:
    window = getattr(spec, "window", None)
    return None if window is None else window.span


def _sources(model: Model, rows: int, generator: torch.Generator) -> list[Source] | None:
    if not model.start_ids:
        return None
    return [model.encode(torch.randint(0, model.vocab, (1, 3 + 5 * r), generator=generator)) for r in range(rows)]
