"""The truth about a transformers model: what its uncached pass over each row alone gives, layer by layer.

Tokens of all rows are numbered through, and a number is a *place*, as in checking/reference.py. What is compared stands
in columns: the input of the first layer, the output of each call of a layer, and the logits, each [N, W].

How much rounding explains is measured on the longest row: the same pass with each layer computed in double precision on
a copy of that layer alone.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lamina.checking import tolerance
from lamina.checking.reference import doubled, in_double
from lamina.checking.transformers.recorder import Pass, Recorder
from lamina.checking.transformers.subject import Sources, Subject

BEFORE, OUTSIDE = "before layer 0", "model"
TIMES = 4.0  # the measured rounding, that a cached pass may be off


@dataclass
class Column:
    """One thing that is compared: values [N, W], the scale of each place [N], and the largest error allowed."""

    name: str
    values: Tensor
    allowed: float = 0.0

    def __post_init__(self) -> None:
        self.scale = tolerance.scales(self.values)

    def errors(self, found: Tensor, places: Tensor) -> Tensor:
        """[n, W], [n] -> [n]"""
        return tolerance.errors(found, self.values[places], self.scale[places])


class Truth:
    """Row s has the places `rows[s]` and, in an encoder–decoder model, the source `sources.alone(s)`."""

    def __init__(self, subject: Subject, ids: list[Tensor], sources: Sources | None) -> None:
        self.subject, self.ids, self.sources = subject, ids, sources
        self.flat_ids: list[int] = torch.cat(ids).tolist()
        starts = [0]
        for row in ids:
            starts.append(starts[-1] + len(row))
        self.rows = [range(a, b) for a, b in pairwise(starts)]
        self.recorder = Recorder(subject.model, subject.layers, subject.ids_name)
        self.columns: list[Column] = []
        self.rounding = 0.0
        """Of the logits."""
        self.unmeasured: str | None = None
        """Why rounding was not measured."""

    def record(self) -> list[Column]:
        """Runs each row; the columns are those of the last time this was called."""
        self.recorder.take()
        with self.recorder.on():
            logits = [self.uncached(s) for s in range(len(self.ids))]
        self.columns = _columns(self.recorder.take(), logits)
        return self.columns

    def uncached(self, row: int) -> Tensor:
        """-> logits [T, vocab]"""
        return self.subject.uncached(self.ids[row][None], self.source(row))[0]

    def source(self, row: int) -> Sources | None:
        return None if self.sources is None else self.sources.alone(row)

    def where(self, place: int) -> tuple[int, int]:
        """The row and position of a place."""
        return next((s, place - row.start) for s, row in enumerate(self.rows) if place in row)

    def measure(self, dtype: torch.dtype) -> None:
        """Sets what every column may be off by, from the rounding of the first row."""
        try:
            with doubled_layers(self.subject), self.recorder.on():
                logits = [self.uncached(0)]
            exact = _columns(self.recorder.take(), logits)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.recorder.take()
            self.unmeasured = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            exact = []
        first = slice(self.rows[0].start, self.rows[0].stop)
        for i, column in enumerate(self.columns):
            if i < len(exact) and exact[i].name == column.name:
                errors = tolerance.errors(column.values[first], exact[i].values, exact[i].scale)
                rounding = float(errors.max())
            else:
                rounding = tolerance.unmeasured(dtype)
            column.allowed = tolerance.allowed(rounding, dtype, TIMES)
            if column.name == OUTSIDE:
                self.rounding = rounding

    def take_allowed(self, other: Truth) -> None:
        """The tolerances of another truth of the same model."""
        known = {column.name: column.allowed for column in other.columns}
        for column in self.columns:
            column.allowed = known.get(column.name, known[OUTSIDE])


def _columns(passes: list[Pass], logits: list[Tensor]) -> list[Column]:
    """One pass for each row, and its logits."""
    parts: list[tuple[str, list[Tensor | None]]] = [(BEFORE, [one.input for one in passes])]
    for i in range(min(len(one.outputs) for one in passes)):
        parts.append((f"layer {i}", [one.outputs[i] for one in passes]))
    parts.append((OUTSIDE, [*logits]))
    return [
        Column(name, torch.cat([value for value in values if value is not None]))
        for name, values in parts
        if all(value is not None for value in values)
    ]


@contextlib.contextmanager
def doubled_layers(subject: Subject) -> Iterator[None]:
    """Every decoder layer computes in double precision, on a copy that lives as long as its call."""
    layers: list[Any] = list(dict.fromkeys(subject.layers))
    held = [layer.__dict__.get("forward") for layer in layers]

    def wide(layer: Any, forward: Any, last: bool) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            made = _copied(layer, forward)(*doubled(given), **doubled(named))
            return _narrow(made, subject.dtype) if last else made  # the rest of the model has its own dtype

        return run

    try:
        for layer, forward in zip(layers, held, strict=True):
            layer.forward = wide(layer, forward, layer is subject.layers[-1])
        yield
    finally:
        for layer, forward in zip(layers, held, strict=True):
            _set(layer, "forward", forward)


def _copied(layer: Any, forward: Any) -> Any:
    """A copy in double precision, without hooks."""
    names = ("forward", "_forward_hooks", "_forward_pre_hooks")
    held = [layer.__dict__.get(name) for name in names]
    try:
        for name, value in zip(names, (forward, OrderedDict(), OrderedDict()), strict=True):
            _set(layer, name, value)
        return in_double(layer)
    finally:
        for name, value in zip(names, held, strict=True):
            _set(layer, name, value)


def _set(layer: Any, name: str, value: Any) -> None:
    if value is None:
        layer.__dict__.pop(name, None)
    else:
        layer.__dict__[name] = value


def _narrow(made: Any, dtype: torch.dtype) -> Any:
    if isinstance(made, Tensor):
        return made.to(dtype)
    return (_narrow(made[0], dtype), *made[1:]) if isinstance(made, tuple) else made
