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
    }

An exact path wins over a prefix, a longer prefix over a shorter one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from lamina.checkpoint.source import Checkpoint

Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class From:
    """One tensor, transformed. `fn` is also run on a meta tensor to learn the shape it gives, so it may not
    look at values."""

    name: str
    fn: Transform


Part = str | From


@dataclass(frozen=True)
class Stack:
    """[E, ...]: entry e is what the parts give for that number, several of them joined along dim 0."""

    parts: Part | tuple[Part, ...]
    over: str = "e"


Value = Part | tuple[Part, ...] | Stack
Names = Mapping[str, Value]


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint on its way into a parameter."""

    name: str
    fn: Transform | None = None

    def shape(self, source: Checkpoint) -> tuple[int, ...]:
        found = source.shape(self.name)
        return found if self.fn is None else tuple(self.fn(torch.empty(found, device="meta")).shape)

    def read(self, source: Checkpoint) -> torch.Tensor:
        tensor = source.read(self.name)
        return tensor if self.fn is None else self.fn(tensor)


@dataclass(frozen=True)
class Recipe:
    """What fills one parameter: entries to stack (one where nothing is stacked), each of pieces to join."""

    entries: tuple[tuple[Piece, ...], ...]
    stacked: bool

    @property
    def sources(self) -> list[str]:
        return [piece.name for entry in self.entries for piece in entry]


def find_recipe(names: Names, path: str, shape: tuple[int, ...]) -> Recipe | None:
    """The recipe for the parameter at `path`, or None where the table has nothing for it."""
    best: tuple[int, str, re.Match[str]] | None = None
    for pattern in names:
        match = re.fullmatch(expression(pattern) + r"(?:\.(?P<_rest>.+))?", path)
        if match is not None:
            rest = match["_rest"] or ""
            if best is None or len(rest) < best[0]:
                best = (len(rest), pattern, match)
    if best is None:
        return None
    _, pattern, match = best
    numbers = {key: text for key, text in match.groupdict().items() if key != "_rest"}
    leaf = "" if match["_rest"] is None else "." + match["_rest"]
    value = names[pattern]
    if not isinstance(value, Stack):
        return Recipe((entry(value, numbers, leaf),), stacked=False)
    count = shape[0] if shape else 0
    return Recipe(tuple(entry(value.parts, numbers | {value.over: str(n)}, leaf) for n in range(count)), stacked=True)


def under(prefix: str, names: Names) -> dict[str, Value]:
    """The same table for checkpoints that hold the model as a part, each name with that prefix.

    >>> under("text.", {"norm": "model.norm"})
    {'norm': 'text.model.norm'}
    """

    def part(value: Part) -> Part:
        return From(prefix + value.name, value.fn) if isinstance(value, From) else prefix + value

    def parts(value: Part | tuple[Part, ...]) -> Part | tuple[Part, ...]:
        return tuple(part(one) for one in value) if isinstance(value, tuple) else part(value)

    return {
        path: Stack(parts(value.parts), value.over) if isinstance(value, Stack) else parts(value)
        for path, value in names.items()
    }


def entry(parts: Part | tuple[Part, ...], numbers: Mapping[str, str], leaf: str) -> tuple[Piece, ...]:
    pieces = []
    for part in parts if isinstance(parts, tuple) else (parts,):
        name, fn = (part.name, part.fn) if isinstance(part, From) else (part, None)
        pieces.append(Piece(re.sub(r"\{(\w+)\}", lambda m: numbers[m[1]], name) + leaf, fn))
    return tuple(pieces)


def expression(pattern: str) -> str:
    """A regular expression for a pattern: `{i}` is a number, `*` anything, the rest itself.

    >>> bool(re.fullmatch(expression("layers.{i}.norm"), "layers.12.norm"))
    True
    """
    pieces = re.split(r"(\{\w+\}|\*)", pattern)
    return "".join(rf"(?P<{p[1:-1]}>\d+)" if p.startswith("{") else ".*" if p == "*" else re.escape(p) for p in pieces)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(expression(pattern), name) for pattern in patterns)
