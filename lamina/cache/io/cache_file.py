"""Cache files: `cache.save(path)` and `lamina.load_cache(path, model)`.

    cache.save("talk.cache")
    cache = lamina.load_cache("talk.cache", model)      # in another process, tomorrow
    model.generate("And then?", cache=cache)            # continues with the tokens of an uninterrupted run

A file is a checked safetensors file (`checked_file.py`): it is written completely or not at all, and a changed byte is
detected. Its text has the fingerprint of the model that made the cache (`fingerprint.py`), the settings of the cache
with the names of its formats, and the clock's marks. Its tensors are the ids of the rows, their last logits, and the
parts of each layer as they are stored: of a line the slots that some row uses, of a ring that has wrapped all of them.
Slots that no later pass may read are written as zeros, so rewound tokens are not in the file. A cache with slack can be
rewound before its first pass, and folding a recurrence then needs the model's constants: they are in the file too.
Recurrent states may be rounded in a file (`state_dtype.py`).
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
from lamina.cache.codec.codec import Codec, Coding
from lamina.cache.codec.key_mean import key_means_of
from lamina.cache.codec.registry import is_registered
from lamina.cache.io import checked_file
from lamina.cache.io.fingerprint import Fingerprint, dtype_name
from lamina.cache.io.state_dtype import round_states, state_dtype, stored_dtype
from lamina.cache.layers.base import Layer
from lamina.cache.pool.pool import check_pool
from lamina.cache.spec import is_model
from lamina.errors import CacheFileError, InputError

if TYPE_CHECKING:
    from lamina.cache.codec.registry import FormatName
    from lamina.cache.pool.pool import Pool
    from lamina.cache.storage.paged import PagedPart
    from lamina.model import Model


def save(cache: Cache, path: str | os.PathLike[str], states: str | None = None) -> None:
    """See `Cache.save`."""
    rounded = state_dtype(states)
    if cache.model is None:
        raise InputError(
            "this cache belongs to no model, and a file names the model: make the cache with model.new_cache()"
        )
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
            name: torch.empty(x.shape, dtype=stored_dtype(layer, name, x, rounded), device="meta")
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
            yield from round_states(own, rounded).data.values()
            yield from constants.get(key, {}).values()

    checked_file.write(path, json.dumps(text), like, contents())


def load_cache(
    path: str | os.PathLike[str],
    model: Model,
    device: str | torch.device | None = None,
    residence: str = "device",
    pool: Pool | None = None,
) -> Cache:
    """The cache that `cache.save` wrote, for the model that made it.

    device      of the cache; the model's own if None
    residence   where its bytes live from now on, as in `model.new_cache`
    pool        a pool to store its tokens in

    With the same dtype and kind of device the cache continues with the same logits, bit for bit. If the model was
    loaded in another dtype, values are converted to it. Another model, a file that was altered, and a file whose format
    is not registered (`lamina.register_format`) are refused.

    >>> cache.save("talk.cache")                                   # doctest: +SKIP
    >>> lamina.load_cache("talk.cache", model).tokens              # doctest: +SKIP
    [[5, 6, 7]]
    """
    if not is_model(model):
        raise InputError(f"model={model!r}: a file is loaded for the model that saved it, as lamina.load returns it")
    if pool is not None:
        check_pool(pool, model, 0, None)
    with checked_file.open_file(path) as file:
        saved = json.loads(file.text)
        made_by, kept = Fingerprint(**saved["model"]), saved["kept"]
        if difference := made_by.difference(model):
            raise CacheFileError(f"{path} was saved by a model {difference}: load it with the model that saved it")
        _refuse_unknown_formats(path, kept["codecs"])
        codecs = [Codec(*names) for names in kept["codecs"]]
        dtype = getattr(torch, kept["dtype"]) if made_by.dtype == dtype_name(model.dtype) else model.dtype
        home = model.device if device is None else _full_device(device)
        if pool is not None:
            _check_settings(pool, home, kept["slack"], codecs)
        cache = Cache(
            model.specs, rows=kept["rows"], capacity=kept["capacity"], slack=kept["slack"], dtype=dtype, device=home,
            max_positions=model.max_positions, model=model, codec=_by_layer(codecs, model),
            key_means=None if all(one.keys == "plain" for one in codecs) else key_means_of(model), residence=residence,
            pool=pool,
        )  # fmt: skip
        cache.codecs = codecs
        cache.clock.set(saved["clock"])
        if cache.pages is not None:
            lengths = saved["clock"]["lengths"]
            cache.pages.widen(max(lengths))
            cache.pages.prepare([(row, 0, length) for row, length in enumerate(lengths)])
        _check_parts(path, cache, file.like)
        targets, like = _targets(cache, file.like, saved), file.like
        for name in sorted(targets.keys() | like.keys()):
            if name not in targets or name not in like or targets[name].shape != like[name].shape:
                raise CacheFileError(f"{path} was saved by a Lamina that differs in {name}: load it with that version")
        for name, tensor in file.tensors():
            targets[name].copy_(tensor)
        for _, layer in _layers(cache):
            if layer.spec.reads_source:
                layer.poison(cache.clock)  # zeros past the end of a source, which older files may not have
    return cache


def _full_device(device: str | torch.device) -> torch.device:
    """The device with its index: "cuda" becomes "cuda:0"."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # unknown, missing, or not compiled into PyTorch
        reason = str(error).partition("\n")[0]
        raise InputError(f"device={device!r} cannot be used: {reason}. Give one such as 'cpu' or 'cuda:0'") from None


def _refuse_unknown_formats(path: str | os.PathLike[str], codecs: Sequence[Sequence[FormatName]]) -> None:
    for name in dict.fromkeys(name for names in codecs for name in names):
        if not is_registered(name):
            raise CacheFileError(
                f"{path} was saved with the format {name!r}, which is not registered: call "
                f"lamina.register_format({name!r}, …) with the class that wrote it before loading the file"
            )


def _check_parts(path: str | os.PathLike[str], cache: Cache, like: Mapping[str, Tensor]) -> None:
    """Raises CacheFileError if a registered format has other parts than the file, as another class of its name may."""
    for key, layer in _layers(cache):
        coding: Coding | None = getattr(layer, "coding", None)
        for field, chosen in ({} if coding is None else coding.formats).items():
            start = f"{key}.{field}."
            saved = {name[len(start) :]: (x.shape[-1], x.dtype) for name, x in like.items() if name.startswith(start)}
            if saved != chosen.parts:
                raise CacheFileError(
                    f"{path} has the parts {saved} of {key}.{field}, and the format {chosen.name!r} has "
                    f"{chosen.parts}: register the class that wrote the file"
                )


def _targets(cache: Cache, like: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Tensor | PagedPart]:
    """Where each tensor of the file is copied to. Layers get as many slots as they had, for bit-identical results."""

    def room(name: str, dtype: torch.dtype | None = None) -> Tensor:
        return allocate(like[name].shape, dtype or like[name].dtype, cache.device)

    rows, longest = like["tokens"].shape
    cache.record = allocate((rows, saved["slots"]["tokens"]), torch.int64, cache.device)
    targets: dict[str, Tensor | PagedPart] = {"tokens": cache.record[:, :longest]}
    if "logits" in like:
        same_dtype = dtype_name(like["logits"].dtype) == saved["kept"]["dtype"]
        cache._logits = targets["logits"] = room("logits", cache.dtype if same_dtype else None)
    for key, layer in _layers(cache):
        if layer.slots is not None:
            layer.widen(saved["slots"][key])
        for name in layer.data:
            if (full := f"{key}.{name}") in like:
                targets[full] = layer.part(name, like[full].shape)
        if (names := saved["constants"].get(key)) is not None:  # a rule without constants has an empty list
            layer.constants = {name: room(f"{key}.constants.{name}") for name in names}
            targets |= _fields(key, layer.constants, "constants.")
    return targets


def _check_settings(pool: Pool, device: torch.device, slack: int, codecs: Sequence[Codec]) -> None:
    """Raises InputError unless a cache with these settings can be stored in the pool."""
    if device != pool.device:
        raise InputError(f"device={device}, but the pool is on {pool.device}: leave device out")
    if slack != pool.slack:
        raise InputError(
            f"the file's cache has a slack of {slack}, the pool {pool.slack}: make a pool with slack={slack}"
        )
    for i, (saved, own) in enumerate(zip(codecs, pool.codecs, strict=True)):
        if saved != own:
            raise InputError(
                f"layer {i} of the file's cache has the codec {saved}, the pool has {own}: make another pool"
            )


def _by_layer(codecs: Sequence[Codec], model: Model) -> dict[int | str, Codec]:
    """Layer number -> codec, for the layers that a codec applies to."""
    takes = [any(spec.takes_codec for spec in entry.values()) for entry in model.specs]
    return {i: codec for i, codec in enumerate(codecs) if takes[i] and not codec.plain}


def _layers(cache: Cache) -> Iterator[tuple[str, Layer]]:
    for i, entry in enumerate(cache.layers):
        for name, layer in entry.items():
            yield f"layers.{i}.{name}", layer


def _fields(key: str, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    return {f"{key}.{prefix}{name}": tensor for name, tensor in tensors.items()}
