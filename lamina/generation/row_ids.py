"""Row ids: the integers by which the noise of sampling tells rows apart.

A row id is a hash of the row's tokens plus the row's index among equal rows of the call. A prompt therefore samples the
same tokens alone and in any batch, and whether it is fed at once or continues a cache that holds its beginning. Equal
prompts, and the sequences of `num_return_sequences`, sample different tokens. The hash is computed once per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.generation.prompt import Prompt
    from lamina.generation.reuse import Continuation

ID_LIMIT = 1 << 32  # the noise reads 32 bits of a row id
BEAM_STRIDE = 0x9E3779B1  # 2**32 / golden ratio: beams of up to a million equal prompts get distinct ids


def check_row_ids(row_ids: Any, rows: int) -> list[int] | None:
    """The caller's `row_ids` as a checked list; None if none were given."""
    if row_ids is None:
        return None
    if hasattr(row_ids, "tolist"):  # a tensor or an array
        row_ids = row_ids.tolist()
    if isinstance(row_ids, str | bytes) or not isinstance(row_ids, Iterable):
        raise InputError(f"row_ids={row_ids!r}: it must be a list of whole numbers, one for each sequence")
    ids = list(row_ids)
    if len(ids) != rows:
        raise InputError(f"row_ids has {len(ids)} ids for {rows} sequences: give one for each")
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, Integral) or not 0 <= int(id) < ID_LIMIT:
            raise InputError(f"row_ids has {id!r}: each must be a whole number from 0 to {ID_LIMIT - 1}")
    return [int(id) for id in ids]


def hash_rows(contents: Iterable[bytes], times: int = 1) -> list[int]:
    """The ids of `times` sequences for each row.

    >>> a, b = ids_as_bytes([5, 6]), ids_as_bytes([7])
    >>> hash_rows([a, b, a])[:2] == [*hash_rows([a]), *hash_rows([b])]
    True
    >>> hash_rows([a], times=3) == hash_rows([a, a, a]), len(set(hash_rows([a, a, a])))
    (True, 3)
    """
    seen: Counter[bytes] = Counter()
    ids = []
    for content in contents:
        digest = blake2b(content, digest_size=16).digest()
        first = int.from_bytes(digest[:4], "little")
        ids += [(first + seen[digest] + n) % ID_LIMIT for n in range(times)]  # equal rows never share an id
        seen[digest] += times
    return ids


def beam_row_ids(row_ids: Iterable[int], beams: int) -> list[int]:
    """The ids of `beams` adjacent rows for each prompt."""
    return [(row_id + beam * BEAM_STRIDE) % ID_LIMIT for row_id in row_ids for beam in range(beams)]


def contents_of(prompt: Prompt, held: Sequence[Sequence[int]], plan: Continuation) -> list[bytes]:
    """The bytes that identify each row after prefill: source, held tokens and prompt.

    held   the tokens of each cache row before `plan` is applied
    """
    kept = [
        [] if row in plan.restart else tokens[: len(tokens) - back]
        for row, (tokens, back) in enumerate(zip(held, plan.back, strict=True))
    ]
    if prompt.embeds is not None and prompt.known is None:
        rows = [_join(ids_as_bytes(before), new) for before, new in zip(kept, _as_bytes(prompt), strict=True)]
    else:
        new = plan.rest if prompt.known is None else prompt.known
        rows = [ids_as_bytes([*before, *after]) for before, after in zip(kept, new, strict=True)]
    if prompt.source is not None:
        rows = [_join(source, row) for source, row in zip(_as_bytes(prompt.source), rows, strict=True)]
    return rows


def ids_as_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """Ids as little-endian int64, which is the same on every machine."""
    return np.asarray(ids, dtype="<i8").tobytes()


def _as_bytes(prompt: Prompt) -> list[bytes]:
    """Each row's ids if they are known, else the values of its embeddings."""
    if prompt.embeds is None or prompt.known is not None:
        return [ids_as_bytes(row) for row in prompt.rows]
    values = prompt.embeds.detach().float().cpu().numpy().astype("<f4", copy=False)
    return [row[:count].tobytes() for row, count in zip(values, prompt.counts, strict=True)]


def _join(*parts: bytes) -> bytes:
    """Concatenates parts, each behind its length, so that different parts never give equal bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
