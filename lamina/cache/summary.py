"""What `print(cache)` shows: a table of layer kinds, slots, dtypes and bytes that covers every tensor of the cache."""

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
    """One line of the table: layers of one kind, or one of the cache's own tensors."""

    kind: str
    layers: int | None
    """How many layers of the kind there are; None for tensors of the cache itself."""
    slots: int | None
    """Token slots per row; None for layers without one slot per token."""
    dtype: str
    nbytes: int
    residence: str = "device"
    """Where the bytes are stored: "device" or "host"."""


def lines(cache: Cache) -> list[Line]:
    """Every tensor of a cache: layers by kind, the record of token ids, each row's last logits, and the clock.

    The staging buffers on the device, into which passes fetch layers that are stored on the host, are one more line.
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
    """The table as text, with a headline."""
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
    """Pads columns to equal width, those in `left` left-aligned, and adds a rule under the first line."""
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
