"""`lamina.verify`: runs the laws on a model with small random inputs.

First come the checks that the laws stand on (basics.py): the same pass twice gives the same bits, blocks leave their
inputs alone, and the uncached pass is exact to rounding. Then the logits of every law are compared with those of an
uncached pass over one row. What rounding may explain is measured, up to a ceiling (tolerance.py). Where a law fails,
every block is run alone, cached, on the inputs it had in the uncached pass; those that differ by more than their own
rounding are named, with row and position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lamina.cache.layers.cross import Source
from lamina.checking.laws import LAWS, Way
from lamina.checking.reference import Reference
from lamina.checking.report import Report
from lamina.checking.transformers import is_transformers_model, verify_transformers
from lamina.checking.verification import Verification
from lamina.checkpoint.progress import Bar
from lamina.errors import InputError
from lamina.model import Model
from lamina.weights.packed import Packed
from lamina.weights.quantize import FLOAT32

LONGEST = 96  # tokens a row, unless asked for more
SLACK = 3


@torch.no_grad()
def verify(
    model: Model | nn.Module,
    *,
    laws: Sequence[str] | None = None,
    rows: int = 3,
    length: int | None = None,
    tries: int = 2,
    seed: int = 0,
    residence: str = "device",
    progress: bool = True,
) -> Report:
    """Proves on this model that the cache changes nothing, or names where it does.

    model   a Lamina model; or a transformers model, whose cached, padded and continued passes, over its own caches and
            over `lamina.bridge.Cache`, are compared with its uncached pass (laws are then the paths of
            checking/transformers/paths.py)
    laws    some of the laws; determinism, inputs and precision are always checked before them
    length  tokens of the longest row; None goes past three times the largest window, as far as 96 tokens reach
    tries   how often each row is fed by each law on each way of keeping, with other cuts each time
    residence   where the bytes of caches live, as in `model.new_cache`
    progress    a bar on standard error, on a terminal, after the first second

    One line of pytest:

    >>> def test_my_model():                        # doctest: +SKIP
    ...     assert lamina.verify(model)
    """
    if not isinstance(model, Model):
        if not is_transformers_model(model):
            raise InputError(f"verify takes a lamina.Model or a transformers model, not {type(model).__name__}")
        check_numbers(rows, length, tries, seed)
        return verify_transformers(
            model, laws=laws, rows=rows, length=length, tries=tries, seed=seed, residence=residence, progress=progress
        )
    chosen = list(LAWS) if laws is None else list(dict.fromkeys(laws))
    for law in chosen:
        if law not in LAWS:
            raise InputError(f"there is no law {law!r}; known: {', '.join(LAWS)}")
    if not chosen:
        raise InputError(f"laws is empty, so nothing would be checked; known: {', '.join(LAWS)}")
    check_numbers(rows, length, tries, seed)
    if length is not None and model.max_positions is not None and length > model.max_positions:
        raise InputError(f"length={length}: the model has positions for {model.max_positions}")
    notes: list[str] = []
    longest = _length(model, notes) if length is None else length
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest, *(max(2, longest * (rows - r) // (rows + 1)) for r in range(1, rows))]
    ids = [torch.randint(0, model.vocab, (n,), generator=generator) for n in lengths]
    room = longest + 7 if model.max_positions is None else min(longest + 7, model.max_positions)
    ways = [
        Way(capacity, slack, model.max_positions)
        for capacity, slack in ((None, SLACK), (longest, SLACK), (None, 0), (room, 0))
    ]
    units = [(law, way) for law in chosen for way in ways if law != "rewind" or way.slack]
    with (
        without_plans(model, notes),
        unrounded(model, notes),
        Bar("verifying", len(units) + 1, "checks", progress) as bar,
    ):
        run = Verification(
            Reference(model, ids, _sources(model, rows, generator)), ways, chosen, notes, tries, residence
        )
        if run.basics():
            bar.advance(1)
            for number, (law, way) in enumerate(units):
                run.try_law(law, way, seed * 1000 + number)
                bar.advance(1)
            run.once_more()
    return run.finished()


def check_numbers(rows: int = 2, length: int | None = None, tries: int = 1, seed: int = 0) -> None:
    """Refuses numbers with which nothing, or less than every law, would be checked.

    >>> check_numbers(tries=0)
    Traceback (most recent call last):
    lamina.errors.InputError: tries=0: give a whole number of at least 1, or nothing would be checked
    """
    for name, value, least, why in (
        ("rows", rows, 2, "a row would have no neighbour"),
        ("length", 2 if length is None else length, 2, "a row could not be cut"),
        ("tries", tries, 1, "nothing would be checked"),
        ("seed", seed, 0, "there are no such draws"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: give a whole number of at least {least}, or {why}")
    if seed >= 2**60:
        raise InputError(f"seed={seed}: give a number below 2**60")


@contextmanager
def without_plans(model: Model, notes: list[str]) -> Iterator[None]:
    """Attention without cuDNN, which takes tenths of a second for a plan of each new shape: laws have hundreds."""
    if model.device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    if model.dtype in (torch.float16, torch.bfloat16):
        notes.append("attention ran without cuDNN, which builds a plan for each of hundreds of shapes")
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@contextmanager
def unrounded(model: Model, notes: list[str]) -> Iterator[None]:
    """Products with packed weights take float32 activations. Rounded to int8, two passes that differ by the order of a
    sum may differ by a step of 1/127 in some values, which could hide a fault."""
    before = model.activations
    if before == FLOAT32 or model.device.type != "cpu" or not any(isinstance(one, Packed) for one in model.modules()):
        yield
        return
    notes.append("products with packed weights took float32 activations")
    model.activations = FLOAT32
    try:
        yield
    finally:
        model.activations = before


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
    if not any(spec.reads_source for entry in model.specs for spec in entry.values()):
        return None
    most = model.max_source_positions or LONGEST
    return [model.random_source(1, min(3 + 5 * r, most), generator) for r in range(rows)]
