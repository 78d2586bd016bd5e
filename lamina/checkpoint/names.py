"""How a family says which checkpoint tensors fill which parameter.

A table maps parameter paths of ours to checkpoint names. A path is exact, or a prefix whose rest (`weight`,
`bias`) is carried over; `{i}`, `{e}` … stand for numbers and are carried over too:

    {
        "embed": "model.embed_tokens",
        "blocks.{i}.attention.qkv": (                                  # one after another along dim 0
            "model.layers.{i}.self_attn.q_proj",
            "model.layers.{i}.self_attn.k_proj",
            "model.layers.{i}.self_attn.v_proj",
        ),
        "blocks.{i}.mixer.A": From("model.layers.{i}.mixer.A_log", lambda t: -t.float().exp()),
        "blocks.{i}.experts.gate_up": Stack(("model.layers.{i}.mlp.experts.{e}.gate_proj.weight",
                                             "model.layers.{i}.mlp.experts.{e}.up_proj.weight")),
        "blocks.{i}.mlp.gate_up": Either("model.layers.{i}.mlp.gate_up_proj",      # whichever the checkpoint has
                                         ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj")),
    }

An exact path wins over a prefix, a longer prefix over a shorter one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from lamina.checkpoint.source import Checkpoint

Transform = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class From:
    """One tensor, or several, transformed into one. `fn` is also run on meta tensors to learn the shape it gives, so it
    may not look at values.

    >>> From(("w.packed", "w.scale"), lambda packed, scale: packed.float() * scale).names
    ('w.packed', 'w.scale')
    """

    name: str | tuple[str, ...]
    fn: Transform

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else self.name


Part = str | From


@dataclass(frozen=True)
class Stack:
    """[E, ...]: entry e is what the parts give for that number, several of them joined along dim 0."""

    parts: Part | tuple[Part, ...]
    over: str = "e"


Single = Part | tuple[Part, ...] | Stack


@dataclass(frozen=True, init=False)
class Either:
    """Layouts of which a checkpoint has one: the first whose tensors are all there."""

    choices: tuple[Single, ...]

    def __init__(self, *choices: Single) -> None:
        object.__setattr__(self, "choices", choices)


Value = Single | Either
Names = Mapping[str, Value]


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint on its way into a parameter; several only if `fn` makes one of them."""

    names: tuple[str, ...]
    fn: Transform | None = None

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        found = [source.shape(name) for name in self.names]
        return found[0] if self.fn is None else tuple(self.fn(*(torch.empty(s, device="meta") for s in found)).shape)

    def read(self, source: Checkpoint) -> torch.Tensor:
        tensors = [source.read(name) for name in self.names]
        return tensors[0] if self.fn is None else self.fn(*tensors)

    def __str__(self) -> str:
        return " with ".join(self.names)


@dataclass(frozen=True)
class Recipe:
    """What fills one parameter: entries to stack (one where nothing is stacked), each of pieces to join."""

    entries: tuple[tuple[Piece, ...], ...]
    stacked: bool

    @property
    def sources(self) -> list[str]:
        return [name for entry in self.entries for piece in entry for name in piece.names]

    def fits(self, source: Checkpoint) -> bool:
        """True if the checkpoint has every tensor of it."""
        return all(name in source.names for name in self.sources)


def find_recipes(names: Names, path: str, shape: tuple[int, ...]) -> list[Recipe]:
    """The recipes for the parameter at `path`, the preferred one first; none where the table has nothing for it."""
    best: tuple[int, str, re.Match[str]] | None = None
    for pattern in names:
        match = re.fullmatch(expression(pattern) + r"(?:\.(?P<_rest>.+))?", path)
        if match is not None:
            rest = match["_rest"] or ""
            if best is None or len(rest) < best[0]:
                best = (len(rest), pattern, match)
    if best is None:
        return []
    _, pattern, match = best
    numbers = {key: text for key, text in match.groupdict().items() if key != "_rest"}
    leaf = "" if match["_rest"] is None else "." + match["_rest"]
    value, count = names[pattern], shape[0] if shape else 0

    def recipe(value: Single) -> Recipe:
        if not isinstance(value, Stack):
            return Recipe((entry(value, numbers, leaf),), stacked=False)
        every = (entry(value.parts, numbers | {value.over: str(n)}, leaf) for n in range(count))
        return Recipe(tuple(every), stacked=True)

    return [recipe(one) for one in (value.choices if isinstance(value, Either) else (value,))]


def renamed(names: Names, rename: Callable[[str], str]) -> dict[str, Value]:
    """The same table with every checkpoint name changed.

    >>> renamed({"norm": "model.norm"}, lambda name: name.replace("model.", "transformer."))
    {'norm': 'transformer.norm'}
    """

    def part(value: Part) -> Part:
        return From(tuple(rename(name) for name in value.names), value.fn) if isinstance(value, From) else rename(value)

    def parts(value: Part | tuple[Part, ...]) -> Part | tuple[Part, ...]:
        return tuple(part(one) for one in value) if isinstance(value, tuple) else part(value)

    def single(value: Single) -> Single:
        return Stack(parts(value.parts), value.over) if isinstance(value, Stack) else parts(value)

    return {
        path: Either(*(single(one) for one in value.choices)) if isinstance(value, Either) else single(value)
        for path, value in names.items()
    }


def either(*tables: Names) -> dict[str, Value]:
    """One table for checkpoints of several layouts: each path is filled as the first table that fits says.

    >>> either({"norm": "model.norm"}, {"norm": "backbone.norm_f"})["norm"].choices
    ('model.norm', 'backbone.norm_f')
    """
    paths = {path: None for table in tables for path in table}  # in order
    found = {path: [table[path] for table in tables if path in table] for path in paths}
    return {path: Either(*(one for value in values for one in choices(value))) for path, values in found.items()}


def stored_names(names: Names) -> list[str]:
    """The checkpoint names of a table, as it spells them.

    >>> stored_names({"norm": "model.norm", "head": Either("lm_head", "model.embed")})
    ['model.norm', 'lm_head', 'model.embed']
    """
    found: list[str] = []

    def keep(name: str) -> str:
        found.append(name)
        return name

    renamed(names, keep)
    return found


def choices(value: Value) -> tuple[Single, ...]:
    return value.choices if isinstance(value, Either) else (value,)


def entry(parts: Part | tuple[Part, ...], numbers: Mapping[str, str], leaf: str) -> tuple[Piece, ...]:
    pieces = []
    for part in parts if isinstance(parts, tuple) else (parts,):
        given, fn = (part.names, part.fn) if isinstance(part, From) else ((part,), None)
        pieces.append(Piece(tuple(re.sub(r"\{(\w+)\}", lambda m: numbers[m[1]], one) + leaf for one in given), fn))
    return tuple(pieces)


@cache
def expression(pattern: str) -> str:
    """A regular expression for a pattern: `{i}` is a number, `*` anything, the rest itself.

    >>> bool(re.fullmatch(expression("layers.{i}.norm"), "layers.12.norm"))
    True
    """
    pieces = re.split(r"(\{\w+\}|\*)", pattern)
    return "".join(rf"(?P<{p[1:-1]}>\d+)" if p.startswith("{") else ".*" if p == "*" else re.escape(p) for p in pieces)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(expression(pattern), name) for pattern in patterns)
