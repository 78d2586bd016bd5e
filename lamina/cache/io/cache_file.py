"""Cache files: `cache.save(path)` and `lamina.load_cache(path, model)`.

    cache.save("talk.cache")
    cache = lamina.load_cache("talk.cache", model)      # in another process, tomorrow
    model.generate("And then?", cache=cache)            # the tokens of an unbroken run

A file is a sealed safetensors file (`checked_file.py`): it is written whole or not at all, and a byte of it that is not
as it was saved is noticed. Its text says which model made the cache (`fingerprint.py`), how it is kept, and the clock's
marks. Its tensors are the rows' ids, their last logits, and a tensor for each field of each layer: of a line the slots
that some row uses, of a ring that has gone round all of it. What no later pass may depend on is written as zeros, so
what was taken back is not in the file. A cache that can go back also needs the recurrences' constants before the first
pass hands them over again: they are in the file too. Recurrent states may be rounded in a file (`io/state_dtype.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.clock import allocate
from lamina.cache.codec.codec import Codec
from lamina.cache.codec.key_mean import centres_of
from lamina.cache.io import checked_file
from lamina.cache.io.fingerprint import Fingerprint, dtype_name
from lamina.cache.io.state_dtype import as_kept, idle, idle_dtype
from lamina.cache.layers.base import Layer
from lamina.cache.pool.pool import checked_pool
from lamina.cache.spec import is_model
from lamina.errors import CacheFileError, InputError

if TYPE_CHECKING:
    from lamina.cache.pool.pool import Pool
    from lamina.cache.storage.paged import PagedPart
    from lamina.model import Model


def save(cache: Cache, path: str | os.PathLike[str], states: str | None = None) -> None:
    """See `Cache.save`."""
    at_rest = idle_dtype(states)
    if cache.model is None:
        raise InputError("this cache belongs to no model, and a file says whose it is: make it with model.new_cache()")
    clock, marks = cache.clock, cache.clock.marks()
    longest = max(marks["lengths"])
    used = {key: layer.used(longest, max(marks["written"])) for key, layer in _layers(cache)}
    constants = {key: layer.constants for key, layer in _layers(cache) if cache.slack and layer.constants is not None}
    text = {
        "model": Fingerprint.of(cache.model).as_values(),
        "kept": {
            "rows": cache.rows, "capacity": cache.capacity, "slack": cache.slack, "dtype": dtype_name(cache.dtype),
            "codecs": [[codec.keys, codec.values] for codec in cache.codecs],
        },
        "clock": marks,
        "slots": {key: layer.slots for key, layer in _layers(cache)} | {"tokens": cache.record.shape[1]},
        "constants": {key: list(tensors) for key, tensors in constants.items()},
    }  # fmt: skip
    tokens = cache.record[:, :longest]
    like = {"tokens": tokens} if cache._logits is None else {"tokens": tokens, "logits": cache._logits}
    for key, layer in used.items():
        fields = {
            name: torch.empty(x.shape, dtype=as_kept(layer, name, x, at_rest), device="meta")
            for name, x in layer.like.items()
        }
        like |= _fields(key, fields) | _fields(key, constants.get(key, {}), "constants.")

    def contents() -> Iterator[Tensor]:
        beyond = torch.arange(longest, device=cache.device) >= clock.lengths[:, None]
        yield tokens.masked_fill(beyond, -1)
        if cache._logits is not None:
            yield cache._logits
        every = torch.arange(cache.rows, device=cache.device)
        for key, layer in used.items():
            own = layer.copied(every)
            own.poison(clock, 0.0)
            yield from idle(own, at_rest).data.values()
            yield from constants.get(key, {}).values()

    checked_file.write(path, json.dumps(text), like, contents())


def load_cache(
    path: str | os.PathLike[str],
    model: Model,
    device: str | torch.device | None = None,
    residence: str = "device",
    pool: Pool | None = None,
) -> Cache:
    """The cache that was saved there, for the model that made it; on the model's own device when none is named.

    Wherever its bytes lived when it was saved, they now live where `residence` says, as in `model.new_cache`.

    In the same dtype and on the same kind of device it goes on to the same logits, bit by bit; a model that was loaded
    in another dtype takes the numbers over into its own. Another model is refused, and so is a file that is not as it
    was saved.

    >>> cache.save("talk.cache")                                   # doctest: +SKIP
    >>> lamina.load_cache("talk.cache", model).tokens              # doctest: +SKIP
    [[5, 6, 7]]
    """
    if not is_model(model):
        raise InputError(f"model={model!r}: a file is loaded for the model that saved it, as lamina.load gives it")
    pool = None if pool is None else checked_pool(pool)
    with checked_file.opened(path) as file:
        saved = json.loads(file.text)
        made_by, kept = Fingerprint(**saved["model"]), saved["kept"]
        if difference := made_by.difference(model):
            raise CacheFileError(f"{path} was saved by a model {difference}: load it with the model that saved it")
        codecs = [Codec(*sides) for sides in kept["codecs"]]
        written = _written(codecs, model)
        dtype = getattr(torch, kept["dtype"]) if made_by.dtype == dtype_name(model.dtype) else model.dtype
        place = model.device if device is None else torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if pool is not None:
            _check_pool(pool, model, place, kept["slack"], codecs)
        cache = Cache(
            model.specs, rows=kept["rows"], capacity=kept["capacity"], slack=kept["slack"], dtype=dtype, device=place,
            max_positions=model.max_positions, model=model, codec=written,
            centres=None if all(one.keys == "plain" for one in codecs) else centres_of(model), residence=residence,
            pool=pool,
        )  # fmt: skip
        cache.codecs = codecs
        cache.clock.set(saved["clock"])
        if cache.pages is not None:
            lengths = saved["clock"]["lengths"]
            cache.pages.widen(max(lengths))
            cache.pages.prepare([(row, 0, length) for row, length in enumerate(lengths)])
        places, like = _places(cache, file.like, saved), file.like
        for name in sorted(places.keys() | like.keys()):
            if name not in places or name not in like or places[name].shape != like[name].shape:
                raise CacheFileError(f"{path} was saved by a Lamina that differs in {name}: load it with that version")
        for name, tensor in file.tensors():
            places[name].copy_(tensor)
        for _, layer in _layers(cache):
            if layer.spec.reads_source:
                layer.poison(cache.clock)  # clears what is past a source's end, which older files do not
    return cache


def _places(cache: Cache, like: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor | PagedPart]:
    """Where each tensor of the file goes. Stores get as many slots as they had: the same slices, the same kernels."""

    def room(name: str, dtype: torch.dtype | None = None) -> Tensor:
        return allocate(like[name].shape, dtype or like[name].dtype, cache.device)

    rows, longest = like["tokens"].shape
    cache.record = allocate((rows, saved["slots"]["tokens"]), torch.int64, cache.device)
    places: dict[str, Tensor | PagedPart] = {"tokens": cache.record[:, :longest]}
    if "logits" in like:
        as_kept = dtype_name(like["logits"].dtype) == saved["kept"]["dtype"]
        cache._logits = places["logits"] = room("logits", cache.dtype if as_kept else None)
    for key, layer in _layers(cache):
        if layer.slots is not None:
            layer.widen(saved["slots"][key])
        for name in layer.data:
            if (full := f"{key}.{name}") in like:
                places[full] = layer.part(name, like[full].shape)
        if (names := saved["constants"].get(key)) is not None:  # of a rule that has none, this too must be known
            layer.constants = {name: room(f"{key}.constants.{name}") for name in names}
            places |= _fields(key, layer.constants, "constants.")
    return places


def _check_pool(pool: Pool, model: Model, device: torch.device, slack: int, codecs: Sequence[Codec]) -> None:
    pool.terms(model, slack, None)
    if device != pool.device:
        raise InputError(f"device={device}, but the pool is on {pool.device}: leave device out")
    if slack != pool.slack:
        raise InputError(
            f"the file's cache has a slack of {slack}, the pool {pool.slack}: make a pool with slack={slack}"
        )
    for i, (saved, own) in enumerate(zip(codecs, pool.codecs, strict=True)):
        if saved != own:
            raise InputError(f"layer {i} of the file's cache is written as {saved}, in the pool as {own}: make another")


def _written(codecs: Sequence[Codec], model: Model) -> dict[int | str, Codec]:
    """Number of a layer -> its codec, for the layers of which a codec writes something."""
    takes = [any(spec.takes_codec for spec in entry.values()) for entry in model.specs]
    return {i: codec for i, codec in enumerate(codecs) if takes[i] and not codec.plain}


def _layers(cache: Cache) -> Iterator[tuple[str, Layer]]:
    for i, entry in enumerate(cache.layers):
        for name, layer in entry.items():
            yield f"layers.{i}.{name}", layer


def _fields(key: str, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    return {f"{key}.{prefix}{name}": tensor for name, tensor in tensors.items()}
