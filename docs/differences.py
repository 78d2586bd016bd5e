"""Finds families whose own cached or padded passes differ from their uncached pass: `python -m docs.differences`

For the first test case of each decoder-only family, transformers alone: a row of 24 tokens in one uncached pass, then
with its cache, 8 tokens and 16 single ones, 8 tokens three times, and in a batch with padding on the left and the
positions that `generate` gives. Differences are relative to the largest logit. The table is written into
docs/differences.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families.cases import CASES
from tests.families.harness import TOLERANCE, pair, random_ids, relative, truth

PAGE = Path(__file__).resolve().parent / "differences.md"
PLACE = re.compile(r"(<!-- own passes: python -m docs.differences -->\n).*?(<!-- end -->)", re.S)
WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "one token at a time": lambda theirs, ids: cached(theirs, ids, [8] + [1] * 16),
    "eight tokens at a time": lambda theirs, ids: cached(theirs, ids, [8, 8, 8]),
    "left-padded": lambda theirs, ids: padded(theirs, ids, 5),
}


@torch.no_grad()
def cached(theirs: Any, ids: Tensor, pieces: Sequence[int]) -> Tensor:
    """Logits [1, T, vocab] of a row [1, T], fed in pieces with the model's own cache."""
    logits, cache, name = [], None, "past_key_values"
    for piece in ids.split(list(pieces), dim=1):
        out = theirs(piece, use_cache=True, **({} if cache is None else {name: cache}))
        name = next(key for key in ("past_key_values", "cache_params", "state") if out.get(key) is not None)
        cache = out[name]
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def padded(theirs: Any, ids: Tensor, padding: int) -> Tensor:
    """Logits [1, T, vocab] of a row [1, T] with padding in front, beside a row without."""
    both = torch.cat([torch.zeros(1, padding, dtype=ids.dtype), ids], dim=1).expand(2, -1).clone()
    both[1] = random_ids(1, both.shape[1], int(ids.max()), seed=1)[0]
    mask = torch.ones_like(both)
    mask[0, :padding] = 0
    at = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # as its `generate` gives them
    known = "position_ids" in inspect.signature(theirs.forward).parameters
    return theirs(both, attention_mask=mask, **at if known else {}).logits[:1, padding:]


def cell(way: Callable[[Any, Tensor], Tensor], theirs: Any, ids: Tensor, expected: Tensor) -> str:
    try:
        error = relative(way(theirs, ids), expected)
    except StopIteration:
        return "returns no cache"
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "" if error < TOLERANCE else f"{error:.0e}"


def table() -> str:
    lines = [f"| family (transformers {version('transformers')}) | {' | '.join(WAYS)} |", f"|---{'|---' * len(WAYS)}|"]
    for family in sorted(CASES):
        theirs, _ = pair(family, next(iter(CASES[family])))
        pair.cache_clear()
        ids = 3 + random_ids(1, 24, 60)
        expected = truth(theirs, ids)
        cells = [cell(way, theirs, ids, expected) for way in WAYS.values()]
        if any(cells):
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda found: found[1] + table() + found[2], PAGE.read_text()))
