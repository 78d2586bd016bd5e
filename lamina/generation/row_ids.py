"""Row numbers: what the noise of sampling tells rows apart by.

A row's number is a hash of its tokens plus its index among the equal rows of the call. So a prompt draws the same
tokens alone and in any batch, fed at once or after a cache that holds its beginning, while equal prompts and the
sequences of `num_return_sequences` draw different ones. The hash is made once per call; nothing is computed per token.
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

NUMBERS = 1 << 32  # row numbers that the noise can tell apart: it reads 32 bits
BETWEEN_BEAMS = 0x9E3779B1  # 2**32 / golden ratio: beams of up to a million equal prompts have different numbers


def given_numbers(row_ids: Any, rows: int) -> list[int] | None:
    """The caller's `row_ids`, checked; None where there are none."""
    if row_ids is None:
        return None
    if hasattr(row_ids, "tolist"):  # a tensor or an array
        row_ids = row_ids.tolist()
    if isinstance(row_ids, str | bytes) or not isinstance(row_ids, Iterable):
        raise InputError(f"row_ids={row_ids!r}: it must be a list of whole numbers, one for each sequence")
    numbers = list(row_ids)
    if len(numbers) != rows:
        raise InputError(f"row_ids has {len(numbers)} numbers for {rows} sequences: give one for each")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Integral) or not 0 <= int(number) < NUMBERS:
            raise InputError(f"row_ids has {number!r}: each must be a whole number from 0 to {NUMBERS - 1}")
    return [int(number) for number in numbers]


def row_numbers(contents: Iterable[bytes], times: int = 1) -> list[int]:
    """A number for each of `times` sequences of each row.

    >>> a, b = ids_as_bytes([5, 6]), ids_as_bytes([7])
    >>> row_numbers([a, b, a])[:2] == [*row_numbers([a]), *row_numbers([b])]
    True
    >>> row_numbers([a], times=3) == row_numbers([a, a, a]), len(set(row_numbers([a, a, a])))
    (True, 3)
    """
    seen: Counter[bytes] = Counter()
    numbers = []
    for content in contents:
        digest = blake2b(content, digest_size=16).digest()
        first = int.from_bytes(digest[:4], "little")
        numbers += [(first + seen[digest] + n) % NUMBERS for n in range(times)]  # equal rows never share a number
        seen[digest] += times
    return numbers


def beam_numbers(numbers: Iterable[int], beams: int) -> list[int]:
    """A number for each of `beams` rows of each prompt, side by side."""
    return [(number + beam * BETWEEN_BEAMS) % NUMBERS for number in numbers for beam in range(beams)]


def contents_of(prompt: Prompt, held: Sequence[Sequence[int]], plan: Continuation) -> list[bytes]:
    """All that each row consists of once its prompt is in, as bytes; `held` is what its cache holds before."""
    kept = [
        [] if row in plan.anew else tokens[: len(tokens) - back]
        for row, (tokens, back) in enumerate(zip(held, plan.back, strict=True))
    ]
    if prompt.embeds is not None and prompt.known is None:
        rows = [_joined(ids_as_bytes(before), new) for before, new in zip(kept, _as_bytes(prompt), strict=True)]
    else:
        new = plan.rest if prompt.known is None else prompt.known
        rows = [ids_as_bytes([*before, *after]) for before, after in zip(kept, new, strict=True)]
    if prompt.source is not None:
        rows = [_joined(source, row) for source, row in zip(_as_bytes(prompt.source), rows, strict=True)]
    return rows


def ids_as_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """The same on every machine."""
    return np.asarray(ids, dtype="<i8").tobytes()


def _as_bytes(prompt: Prompt) -> list[bytes]:
    """Each row's ids where they are known, else the values of its embeddings."""
    if prompt.embeds is None or prompt.known is not None:
        return [ids_as_bytes(row) for row in prompt.rows]
    values = prompt.embeds.detach().float().cpu().numpy().astype("<f4", copy=False)
    return [row[:count].tobytes() for row, count in zip(values, prompt.counts, strict=True)]


def _joined(*parts: bytes) -> bytes:
    """Parts told apart by their lengths."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
