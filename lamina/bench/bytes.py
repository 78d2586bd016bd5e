"""The bytes that a decode step has to move, whoever computes it.

A step of one token a row reads every weight once, however many rows share it; of the embedding only the rows' own
lines, of experts only those that some row visits. It reads every kept token that the new ones can see, writes the new
ones, and reads and writes each recurrent state. Activations never have to leave the chip and are not counted.

These bytes over the bandwidth of the memory give the least time that a step can take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import nn

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.spec import Attention, Convolution, Latent, LayerSpecs, Recurrent, Shared, Spec, Tokens
from lamina.errors import InputError
from lamina.model import Model
from lamina.nn import Experts


@dataclass(frozen=True)
class Moved:
    """Bytes of one step: weights read, kept tokens read, new ones written, states read and written."""

    weights: float = 0
    tokens: float = 0
    new: float = 0
    states: float = 0

    @property
    def total(self) -> float:
        return self.weights + self.tokens + self.new + self.states


def decode_bytes(model: Model, rows: int, context: int, experts: float | None = None) -> Moved:
    """What a step of one token for each of `rows` rows moves when each of them holds `context` tokens.

    experts   how many experts of a layer the rows visit together; what is to be expected when None
    """
    specs, size = model.specs, model.dtype.itemsize
    kept = [_kept_bytes(spec, specs, rows, context, size) for entry in specs for spec in entry.values()]
    return Moved(
        weights=weight_bytes(model, rows, experts),
        tokens=sum(one.tokens for one in kept),
        new=sum(one.new for one in kept),
        states=sum(one.states for one in kept),
    )


# -- weights -------------------------------------------------------------------------------------------------------


def weight_bytes(model: Model, rows: int, experts: float | None = None) -> float:
    owners: dict[int, list[nn.Module]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
            parameters[id(parameter)] = parameter
    return sum(_read_of(parameter, owners[key], model, rows, experts) for key, parameter in parameters.items())


def _read_of(parameter: nn.Parameter, owners: list[nn.Module], model: Model, rows: int, experts: float | None) -> float:
    if all(isinstance(module, nn.Embedding) for module in owners):  # not so where the head is the same matrix
        return parameter.nbytes / parameter.shape[0] * min(rows, parameter.shape[0])
    if any(isinstance(module, Experts) for module in owners):
        every = parameter.shape[0]
        visited = distinct_experts(every, model.config.num_experts_per_tok, rows) if experts is None else experts
        return parameter.nbytes / every * visited
    return parameter.nbytes


def distinct_experts(experts: int, each: int, rows: int) -> float:
    """How many experts are visited by at least one of `rows` tokens that choose `each` of them at random.

    >>> distinct_experts(64, 6, rows=1)
    6.0
    """
    return experts * (1 - (1 - each / experts) ** rows)


# -- what layers remember ------------------------------------------------------------------------------------------


def _kept_bytes(spec: Spec, specs: Sequence[LayerSpecs], rows: int, context: int, size: int) -> Moved:
    if isinstance(spec, Shared):  # reads as many tokens as the layer that wrote them, and writes none
        return replace(moved_by(specs[spec.source][spec.name], rows, context, size), new=0)
    return moved_by(spec, rows, context, size)


@singledispatch
def moved_by(spec: Spec, rows: int, context: int, size: int) -> Moved:
    """What one entry of a cache moves in a step; `size` is the bytes of a number of its dtype."""
    raise InputError(f"how many bytes a {type(spec).__name__} moves in a decode step is not known")


@moved_by.register
def _(spec: Attention, rows: int, context: int, size: int) -> Moved:
    return _of_tokens(spec.kv_heads * (spec.key_dim + spec.value_dim), spec.window, rows, context, size)


@moved_by.register
def _(spec: Latent, rows: int, context: int, size: int) -> Moved:
    return _of_tokens(spec.rank + spec.rope_dim, spec.window, rows, context, size)


@moved_by.register
def _(spec: Tokens, rows: int, context: int, size: int) -> Moved:
    return _of_tokens(spec.dim, spec.window, rows, context, size)


@moved_by.register
def _(spec: Convolution, rows: int, context: int, size: int) -> Moved:
    return Moved(states=rows * (min(context, spec.kernel - 1) + 1) * spec.channels * size)


@moved_by.register
def _(spec: Recurrent, rows: int, context: int, size: int) -> Moved:
    exact = max(size, torch.float32.itemsize)
    return Moved(states=rows * 2 * math.prod(spec.rule.state_shape) * exact)


def _of_tokens(numbers: int, window: Window, rows: int, context: int, size: int) -> Moved:
    token = rows * numbers * size
    return Moved(tokens=visible(window, context) * token, new=token)


def visible(window: Window, position: int) -> int:
    """How many earlier tokens a query at this position sees.

    >>> visible(Sliding(4, keep=1), 10)
    4
    """
    match window:
        case Full():
            return position
        case Sliding(size=size, keep=keep):
            near = min(position, size - 1)
            return near + min(keep, position - near)
        case Chunked(size=size):
            return position % size
    return int(window.sees(torch.tensor(position), torch.arange(position)).sum())
