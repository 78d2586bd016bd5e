"""The bytes that any implementation of a decode step has to move.

A step of one token a row reads every weight once, packed or not, however many rows share it; of the embedding only the
rows' own lines, of experts only those that some row visits, of an encoder nothing. It reads every kept token that the
new ones can see (every key of an indexer, and of the latents those that it selects), writes the new ones, and reads and
writes each recurrent state. Activations never have to leave the chip and are not counted.

These bytes over the bandwidth of the memory give the least time that a step can take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import nn

from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache.codec.codec import Codecs, codecs_of
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.spec import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Keeping,
    Latent,
    LayerSpecs,
    Recurrent,
    SharedIndex,
    Spec,
    Tokens,
)
from lamina.errors import InputError
from lamina.model import Model
from lamina.nn import CrossAttention, Experts, Router
from lamina.weights.inventory import Weight, inside, own_weights


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


def decode_bytes(
    model: Model,
    rows: int,
    context: int,
    experts: float | None = None,
    source: int | None = None,
    codec: Codecs | None = None,
) -> Moved:
    """What a step of one token for each of `rows` rows moves when each of them holds `context` tokens.

    experts   how many experts of a layer the rows visit together; what is to be expected when None
    source    tokens of each row's source, for models that read one
    codec     how the cache writes keys and values, as in `model.new_cache`
    """
    kept = [one for _, one in _all_kept(model, rows, context, source, codec, selects=True)]
    return Moved(
        weights=weight_bytes(model, rows, experts),
        tokens=sum(one.tokens for one in kept),
        new=sum(one.new for one in kept),
        states=sum(one.states for one in kept),
    )


def fetched_bytes(
    model: Model, rows: int, context: int, source: int | None = None, codec: Codecs | None = None
) -> float:
    """What the same step moves between host and device where the cache lives on the host: a layer that reads another's
    keys and values finds them on the device."""
    every = _all_kept(model, rows, context, source, codec)
    return sum(one.total for spec, one in every if spec.reads_from is None)


def _all_kept(
    model: Model, rows: int, context: int, source: int | None, codec: Codecs | None, *, selects: bool = False
) -> list[tuple[Spec, Moved]]:
    """selects   of latents, only the tokens that an indexer selects count"""
    specs = model.specs
    plain = Keeping(rows, None, 0, model.dtype, torch.device("meta"))
    layers = [replace(plain, codec=one) for one in codecs_of(codec, specs)]
    return [
        (spec, _kept_bytes(spec, specs, rows, min(context, most), source, keeping))
        for entry, keeping in zip(specs, layers, strict=True)
        for spec in entry.values()
        for most in [selected_by(entry, specs, context) if selects and isinstance(spec, Latent) else context]
    ]


# -- weights -------------------------------------------------------------------------------------------------------


def weight_bytes(model: Model, rows: int, experts: float | None = None) -> float:
    owners: dict[int, list[nn.Module]] = {}
    weights: dict[int, Weight] = {}
    for module in _decoding(model):
        for weight in own_weights(module).values():
            owners.setdefault(id(weight), []).append(module)
            weights[id(weight)] = weight
    each = chosen_experts(model)
    return sum(_read_of(weight, owners[key], each, rows, experts) for key, weight in weights.items())


def chosen_experts(model: Model) -> dict[int, int]:
    """For each `Experts` module of a model, by its id: how many experts a token visits."""
    pairs = ((getattr(module, "experts", None), getattr(module, "router", None)) for module in model.modules())
    return {
        id(experts): router.choice.each
        for experts, router in pairs
        if isinstance(experts, Experts) and isinstance(router, Router)
    }


def _decoding(model: Model) -> list[nn.Module]:
    """The modules that a decode step runs: an encoder, and what makes keys and values of its output, ran before."""
    found: dict[int, nn.Module] = {}
    before = {id(module.kv) for module in model.modules() if isinstance(module, CrossAttention)}
    for path, module in inside(model):
        if path.split(".")[0] != "encoder" and id(module) not in before:
            found[id(module)] = module
    return list(found.values())


def _read_of(
    weight: Weight, owners: list[nn.Module], each: Mapping[int, int], rows: int, experts: float | None
) -> float:
    if all(isinstance(module, nn.Embedding) for module in owners):  # not so where the head is the same matrix
        return weight.nbytes / weight.shape[0] * min(rows, weight.shape[0])
    if found := [module for module in owners if isinstance(module, Experts)]:
        every = weight.shape[0]
        if experts is None:
            choices = every + found[0].identity  # identity experts have nothing to read
            experts = distinct_experts(choices, each[id(found[0])], rows) * every / choices
        return weight.nbytes / every * experts
    return weight.nbytes


def distinct_experts(experts: int, each: int, rows: int) -> float:
    """How many experts are visited by at least one of `rows` tokens that choose `each` of them at random.

    >>> distinct_experts(64, 6, rows=1)
    6.0
    """
    return experts * (1 - (1 - each / experts) ** rows)


# -- what layers remember ------------------------------------------------------------------------------------------


def _kept_bytes(
    spec: Spec, specs: Sequence[LayerSpecs], rows: int, context: int, source: int | None, keeping: Keeping
) -> Moved:
    if isinstance(spec, SharedIndex):  # reads positions alone
        return Moved()
    if spec.reads_from is not None:  # reads as many tokens as the layer that wrote them, and writes none
        layer, name = spec.reads_from
        return replace(moved_by(specs[layer][name], rows, context, keeping), new=0)
    if spec.reads_source:
        if source is None:
            raise InputError("this model reads a source: say how many tokens it has with source=…")
        context = source
    return moved_by(spec, rows, context, keeping)


def selected_by(entry: LayerSpecs, specs: Sequence[LayerSpecs], context: int) -> int:
    """How many of `context` kept tokens a layer attends to at most: those that its indexer, or that of another layer,
    selects."""
    every = [specs[one.source][one.name] if isinstance(one, SharedIndex) else one for one in entry.values()]
    return min([context, *(one.top for one in every if isinstance(one, IndexKeys))])


def bytes_of_one(spec: Spec, keeping: Keeping) -> int:
    """Bytes that one row has of an entry with room for one token and no slack, as its layer lays them out."""
    return spec.layer(replace(keeping, rows=1, capacity=1, slack=0, device=torch.device("meta"))).nbytes


@singledispatch
def moved_by(spec: Spec, rows: int, context: int, keeping: Keeping) -> Moved:
    """Bytes that one entry of a cache moves in a decode step. A kind from outside the package that does not register
    here reads and writes all that its layer stores, or reads a slot per token."""
    layer = spec.layer(replace(keeping, rows=1, capacity=1, slack=0, device=torch.device("meta")))
    if layer.slots is None:
        return Moved(states=rows * 2 * layer.nbytes)
    return Moved(tokens=rows * context * layer.nbytes, new=rows * layer.nbytes)


@moved_by.register(Attention)
@moved_by.register(Latent)
@moved_by.register(Tokens)
def _(spec: Attention | Latent | Tokens, rows: int, context: int, keeping: Keeping) -> Moved:
    token = rows * bytes_of_one(spec, keeping)
    return Moved(tokens=visible(spec.window, context) * token, new=token)


@moved_by.register
def _(spec: Convolution, rows: int, context: int, keeping: Keeping) -> Moved:
    token = bytes_of_one(spec, keeping) // spec.kernel  # it always has room for all that it mixes
    return Moved(states=rows * (min(context, spec.kernel - 1) + 1) * token)


@moved_by.register
def _(spec: Recurrent, rows: int, context: int, keeping: Keeping) -> Moved:
    return Moved(states=rows * 2 * bytes_of_one(spec, keeping))


@moved_by.register
def _(spec: Cross, rows: int, context: int, keeping: Keeping) -> Moved:
    layer = CrossLayer(spec, replace(keeping, rows=1, device=torch.device("meta")))
    layer.widen(1)
    return Moved(tokens=rows * context * sum(part.nbytes for part in layer.parts.values()))


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
