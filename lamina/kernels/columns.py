"""The columns of the int64 tables through which kernels find a cache, declared once for the host and for the kernels.

A captured launch cannot take pointers into a cache as arguments: they would be fixed at capture. Its kernels take a
pointer to one row of a table on the device instead, and the host rewrites the table when it serves another cache.

    ENTRY     one row per cache entry (one spec of one layer): pointers to its stores, their sizes, lengths and counts
    HEADER    one row per cache: its clock, its token record and its last logits

The host builds rows by name (`entry_row`, `header_row`). Kernels read columns by constants that are derived from the
same tuples (`entry.py`, `step_ends.py`). This module does not import Triton.
"""

from __future__ import annotations

from collections.abc import Mapping

from lamina.errors import InputError

ENTRY = (
    "k",  # pointer: keys [B, H, S, D] or their codes; for entries with one field: the latents, inputs or states
    "v",  # pointer: values [B, H, S, Dv] or their codes
    "slots",  # slots per row, S; slots per page for a paged entry
    "ring",  # slots of the ring, 0 for a line
    "keep",  # first tokens that a ring never overwrites
    "lengths",  # pointer: committed tokens per row, int64 [B]
    "counts",  # pointer: new tokens per row, int64 [B]; 0: every row has all of them
    "pages",  # pointer: page table, int32 [B, pages_per_row]
    "pages_per_row",
    "k.scales",  # pointer: scales (and offsets) of the key codes, float16
    "v.scales",
    "k.high",  # pointer: bits above the fourth of 5- and 6-bit key codes, uint8
    "v.high",
    "scores",  # pointer: scratch for the scores of an indexer, float32 [B, T, score_room]
    "score_room",
    "slack",  # tokens that a recurrent state can be rewound by; the columns below are for native programs
    "bases",  # pointer: position of the base state per row, int64 [B]
    "base",  # pointer: base states [B, *state]
    *(f"log.{i}" for i in range(5)),  # pointers: inputs of the last tokens [B, 2 · slack, *shape], in the rule's order
)
WIDTH = 24  # int64 values per row of the entry table; those past the named columns are 0

HEADER = (
    "lengths",  # pointer: committed tokens per row, int64 [B]
    "written",  # pointer: one past the highest position ever written per row, int64 [B]
    "base",  # pointer: position of the recurrent base state per row, int64 [B]
    "record",  # pointer: the token ids of each row, int64 [B, record_width]
    "record_width",
    "logits",  # pointer: logits after each row's last token [B, V]
    "slack",
)

ENTRY_AT = {name: i for i, name in enumerate(ENTRY)}
NO_COLUMNS = [0] * WIDTH


def entry_row(values: Mapping[str, int], others: list[int] = NO_COLUMNS) -> list[int]:
    """One row of the entry table, [WIDTH]; columns without a value are those of the row `others`.

    >>> entry_row({"slots": 64, "ring": 8})[:4]
    [0, 0, 64, 8]
    """
    row = others.copy()  # a cache has hundreds of rows, and they are made before every prompt of a new cache
    try:
        for name, value in values.items():
            row[ENTRY_AT[name]] = value
    except KeyError:
        raise _no_column(values, ENTRY) from None
    return row


def header_row(values: Mapping[str, int]) -> list[int]:
    """The header of one cache, [len(HEADER)]; every column needs a value."""
    if missing := [name for name in HEADER if name not in values]:
        raise InputError(f"a header without {', '.join(missing)}: it needs {', '.join(HEADER)}")
    if len(values) > len(HEADER):
        raise _no_column(values, HEADER)
    return [values[name] for name in HEADER]


def _no_column(values: Mapping[str, int], columns: tuple[str, ...]) -> InputError:
    unknown = [name for name in values if name not in columns]
    return InputError(f"no column {', '.join(unknown)}; the columns are {', '.join(columns)}")
