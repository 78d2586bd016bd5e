"""`chunk_for`: how many tokens of a prompt are fed in one pass, by the memory there is.

Most prompts fit as a whole, which a bound without any measurement shows (`sure_bytes`). For others the memory of a pass
is known from six small ones (`lamina.rehearsal.cost`), once per model. If the whole prompt does not fit into the
free memory, chunks are powers of two: such sizes suit kernels, and cuDNN's attention, which plans every new size, sees
few of them. `prefill_chunk` of `generate` overrules all of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from lamina import kernels
from lamina.cache.cache import Cache
from lamina.cache.packed import LEAST_PADDING, LEAST_SHARE
from lamina.notices import notice
from lamina.rehearsal.cost import pass_cost
from lamina.rehearsal.free_memory import free_memory
from lamina.runtime.feed import why_not_packed

if TYPE_CHECKING:
    from lamina.model import Model

FEW = 512  # tokens of all rows: so few are never fed in several passes
LEAST = 16  # tokens of a row in a chunk
SHARE = 0.8  # of the free memory that a pass may take: the rest is for workspaces, fragments and other users
_widths: WeakKeyDictionary[Model, int] = WeakKeyDictionary()


def chunk_for(model: Model, cache: Cache, counts: Sequence[int]) -> int | None:
    """Tokens of a row in one pass, a power of two; None: the whole prompt in one.

    counts   tokens of the prompt of each row
    """
    longest = max(counts)
    if len(counts) * longest <= FEW or (free := free_memory(model.device)) is None:
        return None
    keys = max(cache.clock.high) + longest
    if sure_bytes(model, len(counts), longest, keys) <= SHARE * free or (cost := pass_cost(model, cache)) is None:
        return None

    def fits(size: int) -> bool:
        real = sum(min(count, size) for count in counts)
        packed = real if packs(model, len(counts) * size, real) else None
        return cost.nbytes(len(counts), size, keys, packed, even) <= SHARE * free

    size, even = longest, len(set(counts)) == 1
    while not fits(size) and (less := smaller(size, len(counts))) is not None:
        size = less
    if size == longest:
        return None
    fitting = "" if fits(size) else "; even these may not fit"
    notice(
        f"a prompt of {longest:,} tokens is fed in chunks of {size:,}: as a whole it does not fit into the "
        f"{free / 2**30:.1f} GiB that are free{fitting}"
    )
    return size


def sure_bytes(model: Model, rows: int, tokens: int, keys: int) -> int:
    """More than any pass of this size takes, from the shapes of the weights alone: per token 32 times the widest
    activation in float32 with kernels and 256 times without, where recurrences keep states; per token and key a mask,
    or without kernels scores of many heads."""
    if (width := _widths.get(model)) is None:
        width = _widths[model] = widest(model)
    by_kernels = model.device.type == "cuda" and kernels.usable(next(model.parameters()))
    token, pair = (32 * 4 * width, 64) if by_kernels else (256 * 4 * width, width // 4)
    return rows * tokens * (token + keys * pair)


def widest(model: Model) -> int:
    """Features of the widest weight of the blocks."""
    return max((max(x.shape, default=1) for block in model.blocks for x in block.parameters()), default=1)


def packs(model: Model, tokens: int, real: int) -> bool:
    """Whether a pass of `tokens` tokens, of which `real` are no padding, runs packed."""
    padding = tokens - real
    return padding >= max(LEAST_PADDING, LEAST_SHARE * tokens) and why_not_packed(model) is None


def smaller(size: int, rows: int = 1) -> int | None:
    """The next smaller size of a chunk, a power of two; None if there is none.

    >>> smaller(10_000), smaller(8192), smaller(512), smaller(64, rows=8)
    (8192, 4096, None, None)
    """
    least = max(LEAST, FEW // rows)
    found = 1 << max(size - 1, 1).bit_length() - 1
    return found if found >= least else None


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch could not allocate memory, on a GPU or on the CPU."""
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
