"""A cache as a small table: kinds of layers, slots, number format, bytes; every tensor that it holds is in a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from lamina.cache.cache import Cache


def size(nbytes: int) -> str:
    """
    >>> size(1536)
    '1.5 KiB'
    """
    number, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} {units[0]}" if units[0] == "B" else f"{number:.1f} {units[0]}"


@dataclass(frozen=True)
class Line:
    """Bytes of one kind of thing that a cache holds."""

    kind: str
    layers: int | None
    """How many layers of the kind there are; None for what belongs to the cache itself."""
    slots: int | None
    """Token slots of a row; None for what is not kept by token."""
    dtype: str
    nbytes: int
    residence: str = "device"
    """Where the bytes live."""


def lines(cache: Cache) -> list[Line]:
    """Every tensor of a cache: its kinds of layers, the ids it was fed, each row's last logits, and the clock.

    Of layers that live on the host, what passes fetch lies in windows on the device: a line of their own.
    """
    groups: dict[tuple[str, int | None, str, str], list[int]] = {}
    for entry in cache.layers:
        for layer in entry.values():
            group = (layer.kind, layer.slots, layer.format, layer.storage.residence)
            groups.setdefault(group, []).append(layer.nbytes)
    found = [
        Line(kind, len(each), slots, dtype, sum(each), residence)
        for (kind, slots, dtype, residence), each in groups.items()
    ]
    if cache.fetcher is not None:
        found.append(Line("fetched", None, None, "", cache.fetcher.nbytes))
    if cache.pages is not None:
        found.append(Line("page tables", None, None, "int32", cache.pages.nbytes))
    found.append(Line("token ids", None, cache.record.shape[1], "int64", cache.record.nbytes))
    if cache._logits is not None:
        found.append(Line("logits", None, None, _dtypes([cache._logits]), cache._logits.nbytes))
    marks = [mark for mark in vars(cache.clock).values() if isinstance(mark, Tensor)]
    return [*found, Line("clock", None, None, "int64", sum(mark.nbytes for mark in marks))]


def table(cache: Cache) -> str:
    """What `print(cache)` shows."""
    found = lines(cache)
    body: list[tuple[str, ...]] = [("kind", "layers", "slots", "dtype", "bytes")]
    body += [(line.kind, *map(_cell, (line.layers, line.slots)), line.dtype, size(line.nbytes)) for line in found]
    body.append(("all", str(len(cache.layers)), "", "", size(sum(line.nbytes for line in found))))
    if cache.fetcher is not None:
        where = {name: size(sum(x.nbytes for x in found if x.residence == name)) for name in ("device", "host")}
        body = [(*cells, name) for cells, name in zip(body, ["", *(x.residence for x in found), ""], strict=True)]
        body += [("", "", "", "", nbytes, name) for name, nbytes in where.items()]
    room = "grows" if cache.capacity is None else f"capacity {cache.capacity}"
    if cache.pages is not None:
        own, shared = cache.pages.own_and_shared
        room += f", in pages of {cache.pages.pool.page} ({size(own)} of its own, {size(shared)} shared with others)"
    lengths = cache.clock.sync()
    shown = ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")
    head = f"Cache of {cache.rows} row{'s' * (cache.rows != 1)}, {room}, slack {cache.slack}, lengths [{shown}]"
    return "\n".join([head, *aligned(body, left=(0, 3, 5))])


def aligned(body: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Columns of one width, those named in `left` to the left; a rule under the first line."""
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    shown = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in body
    ]
    return [shown[0], "  ".join("-" * w for w in widths), *shown[1:]]


def _cell(number: int | None) -> str:
    return "" if number is None else str(number)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors if x.is_floating_point()}))
