"""A cache as a small table: kinds of layers, slots, number format, bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.cache.cache import Cache
    from lamina.cache.layer import Layer


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


def table(cache: Cache) -> str:
    """What `print(cache)` shows."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for entry in cache.layers:
        for layer in entry.values():
            groups.setdefault(_columns(layer), []).append(layer.nbytes)
    lines = [("kind", "layers", "slots", "dtype", "bytes")]
    lines += [(kind, str(len(sizes)), slots, dtype, size(sum(sizes))) for (kind, slots, dtype), sizes in groups.items()]
    lines.append(("all", str(len(cache.layers)), "", "", size(cache.nbytes)))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    body = [
        "  ".join(
            cell.ljust(w) if i in (0, 3) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    body.insert(1, "  ".join("-" * w for w in widths))
    room = "grows" if cache.capacity is None else f"capacity {cache.capacity}"
    lengths = cache.clock.sync()
    shown = ", ".join(map(str, lengths[:8])) + (", …" if len(lengths) > 8 else "")
    head = f"Cache of {cache.rows} row{'s' * (cache.rows != 1)}, {room}, slack {cache.slack}, lengths [{shown}]"
    return "\n".join([head, *(line.rstrip() for line in body)])


def _columns(layer: Layer) -> tuple[str, str, str]:
    slots = layer.slots
    return layer.kind, "" if slots is None else str(slots), layer.format
