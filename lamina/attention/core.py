"""`attention`: the one function that caches call, whichever backend runs it.

It checks shapes, zeroes unused slots (which may hold NaN), and picks a backend. To add a backend, put a function with
the signature of `eager` into `BACKENDS`, or one that runs some calls best into `OFFERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lamina.attention.reference import Bias
from lamina.attention.torch_backends import eager, flex, sdpa
from lamina.attention.view import View
from lamina.attention.window import Full
from lamina.errors import InputError

Backend = Callable[..., Tensor]
BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "eager": eager, "flex": flex}

FEW, MANY, MOST = 16, 1024, 1 << 26  # limits on queries (at most), keys (at least), and scores in memory (at most)

Fits = Callable[..., bool]
"""fits(q, k, v, view, softcap, sinks, bias): whether a backend that is offered runs this call, and best"""


@dataclass(frozen=True)
class Offer:
    """A backend for some calls. masks_itself: unused slots need not be zeroed for it"""

    run: Backend
    fits: Fits
    masks_itself: bool = False


OFFERS: dict[str, Offer] = {}
"""Asked in this order before a backend of `BACKENDS` is picked."""


class Way(NamedTuple):
    """How a call of `attention` was run: by which backend, for which window, scores that are changed by what, and
    values of a query head."""

    backend: str
    window: str
    changed: tuple[str, ...]
    dim: int

    @classmethod
    def of(cls, backend: str, q: Tensor, view: View, **changes: object) -> Way:
        window = view.window
        name = "full" if isinstance(window, Full) else f"{type(window).__name__.lower()} {window.span or ''}".strip()
        return cls(backend, name, tuple(name for name, by in changes.items() if by is not None), q.shape[-1])


Calls = dict[Way, int]
_noted: ContextVar[Calls | None] = ContextVar("noted", default=None)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def attention(
    q: Tensor,  # [B, Hq, T, D]
    k: Tensor,  # [B, Hk, S, D], Hq a multiple of Hk
    v: Tensor,  # [B, Hk, S, Dv]
    view: View,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [Hq]
    bias: Bias | None = None,
    backend: str | Backend | None = None,
) -> Tensor:
    """softmax(softcap(scale * q k^T) + bias) v over the keys that `view` shows: [B, Hq, T, Dv].

    `sinks` has one logit per head, which takes part in the softmax and has no value. `bias` is called as
    `reference.Bias` says. `backend` is a name in `BACKENDS` or a function like those there; None means one of `OFFERS`
    that fits, "sdpa", or "eager" if scores are modified or a GPU has few queries and many keys. Slots without a token
    never affect the output, whatever they hold; a query that sees no key gives zeros.

    >>> import torch
    >>> from lamina.attention import Full, View
    >>> q, k, v = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 3)
    >>> at = torch.arange(2)[None]
    >>> attention(q, k, v, View(at, at, Full(), exact=True), scale=8**-0.5).shape
    torch.Size([1, 4, 2, 3])
    """
    if isinstance(backend, str) and backend not in BACKENDS:
        raise InputError(f"unknown attention backend {backend!r}: known are {', '.join(sorted(BACKENDS))}")
    if not torch.compiler.is_exporting():  # which takes as long as it has lines to trace; eager passes were checked
        _check(q, k, v, view, softcap, sinks)
    if 0 in q.shape[:3] or k.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    name = best_backend(q, k, v, view, softcap, sinks, bias) if backend is None else backend
    if isinstance(name, str):
        note(name, q, view, softcap=softcap, sinks=sinks, bias=bias)
    offer = OFFERS.get(name) if isinstance(name, str) else None
    if not view.clean and (offer is None or not offer.masks_itself):
        k, v = without_unused(k, view), without_unused(v, view)
    run = offer.run if offer is not None else BACKENDS[name] if isinstance(name, str) else name
    return run(q, k, v, view, scale=scale, softcap=softcap, sinks=sinks, bias=bias)


def note(backend: str, q: Tensor, view: View, **changes: object) -> None:
    """Counts a call that this backend runs, for the caller of `noted`, if any."""
    if not torch.compiler.is_compiling() and (calls := _noted.get()) is not None:
        way = Way.of(backend, q, view, **changes)
        calls[way] = calls.get(way, 0) + 1


@contextmanager
def noted(calls: Calls) -> Iterator[None]:
    """Inside, in this thread, calls of `attention`, and of kernels in its place, are counted by the way they run.

    >>> calls = {}
    >>> with noted(calls):
    ...     pass
    >>> calls
    {}
    """
    before = _noted.set(calls)
    try:
        yield
    finally:
        _noted.reset(before)


def best_backend(
    q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None, bias: Bias | None
) -> str:
    """The name of the backend that runs this call fastest, in `OFFERS` or `BACKENDS`."""
    changed = softcap is not None or sinks is not None or bias is not None
    offered = (name for name, offer in OFFERS.items() if offer.fits(q, k, v, view, softcap, sinks, bias))
    return next(offered, "eager" if changed or few_over_many(q, k) else "sdpa")


def few_over_many(q: Tensor, k: Tensor) -> bool:
    """True if plain matrix products are faster: PyTorch's fused kernels loop over all keys of a head in one program, so
    with few queries most SMs are idle."""
    if not q.is_cuda or torch.compiler.is_compiling():  # before sizes are compared, which a traced program may vary
        return False
    keys, scores = k.shape[2], q.shape[:3].numel() * k.shape[2]
    return q.shape[2] <= FEW and keys >= MANY and scores <= MOST


def without_unused(x: Tensor, view: View) -> Tensor:
    """A copy of x [B, Hk, S, D] with zeros in slots without a token: a NaN there, times a weight of 0, would be NaN."""
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return x.masked_fill(~view.exists(), 0)
    # Clearing the bits costs as much as a plain copy; uncompiled masked_fill is several times slower on the CPU.
    # Integer operations have no gradient.
    bits = _BITS[x.element_size()]
    return (x.view(bits) & -view.exists().to(bits)).view(x.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, view: View, softcap: float | None, sinks: Tensor | None) -> None:
    B, T, S = view.shape
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise InputError(f"q, k and v are [B, H, tokens, D], not {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != B or q.shape[2] != T:
        raise InputError(f"q is {list(q.shape)}, but the view has {B} rows and {T} queries")
    if k.shape[0] != B or k.shape[2] != S:
        raise InputError(f"k is {list(k.shape)}, but the view has {B} rows and {S} slots")
    if v.shape[:3] != k.shape[:3]:
        raise InputError(f"v is {list(v.shape)} and k {list(k.shape)}: rows, heads and slots must agree")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q has head dim {q.shape[3]} and k {k.shape[3]}: they must agree")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if softcap is not None and softcap <= 0:
        raise InputError(f"softcap={softcap}: a cap is positive; None means no cap")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise InputError(
            f"sinks is {list(sinks.shape)}: it must hold one logit for each of the {q.shape[1]} query heads"
        )
