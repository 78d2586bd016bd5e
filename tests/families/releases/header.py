"""Headers of published checkpoints in a short notation, and a checkpoint that has nothing else.

    model.layers.<layers>.mlp.{gate,up}_proj.weight 9216 2304

is a tensor name and a shape. `{a,b}` stands for several names, `<0-2,5>` for a range of numbers, `<name>` for a range
that is given by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from lamina.checkpoint.source import Checkpoint
from lamina.checkpoint.tokenizer import Tokenizer

CHOICE = re.compile(r"(\{[^}]*\}|<[^>]*>)")


def header(text: str, **ranges: Any) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape. `ranges` are numbers by name, or how many there are, from 0 on.

    >>> header("layers.<n>.{gate,up} 4 2", n=2)
    {'layers.0.gate': (4, 2), 'layers.0.up': (4, 2), 'layers.1.gate': (4, 2), 'layers.1.up': (4, 2)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for line in text.split("\n"):
        if line.strip():
            pattern, *sizes = line.split()
            shape = tuple(int(size) for size in sizes)
            found |= dict.fromkeys(expand(pattern, ranges), shape)
    return found


def expand(pattern: str, ranges: Mapping[str, Any]) -> Iterator[str]:
    parts = [list(choices(part, ranges)) for part in CHOICE.split(pattern)]
    return ("".join(chosen) for chosen in product(*parts))


def choices(part: str, ranges: Mapping[str, Any]) -> Iterator[str]:
    if part.startswith("{"):
        yield from part[1:-1].split(",")
    elif not part.startswith("<"):
        yield part
    elif (name := part[1:-1]) in ranges:
        given = ranges[name]
        yield from map(str, range(given) if isinstance(given, int) else given)
    else:
        for piece in name.split(","):
            first, _, last = piece.partition("-")
            yield from map(str, range(int(first), int(last or first) + 1))


class Header(Checkpoint):
    """A checkpoint of which only names and shapes are known."""

    def __init__(self, name: str, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path, self.config, self.generation_config, self.shapes = Path(name), config, {}, shapes

    @property
    def names(self) -> Set[str]:
        return self.shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name.endswith(("_blocks", "_scales")) else torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(())  # tied tensors are compared: here they are equal

    def tokenizer(self) -> Tokenizer | None:
        return None

    @property
    def count(self) -> int:
        """The number of values in all tensors."""
        return sum(map(prod, self.shapes.values()))
