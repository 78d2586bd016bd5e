"""`View`: which keys the queries of one pass may see.

One rule over positions covers causal, sliding, chunked, bidirectional, packed and padded attention. A View is made once
per pass and kind of window, and shared by all layers of that kind. Its lowered forms (nothing, `is_causal`, a boolean
mask, a FlexAttention block mask) are computed on first use and kept. Only `grid` reads a tensor's values, so a View can
be made inside a compiled pass.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lamina.attention.blocks import Blocks, blocks_of
from lamina.attention.mask_bits import MaskBits, mask_bits_of
from lamina.attention.window import Window
from lamina.errors import InputError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""rule(row, q_pos, kv_pos) -> bool. Elementwise: it is called with row [B, 1, 1], q_pos [B, T, 1] and kv_pos [B, 1, S],
or with parts of these, and by FlexAttention with three 0-dim tensors. A slot without a token has kv_pos -1."""

ALL = slice(None)


def both(a: Rule, b: Rule) -> Rule:
    """The rule that is True where `a` and `b` are."""
    return lambda row, q_pos, kv_pos: a(row, q_pos, kv_pos) & b(row, q_pos, kv_pos)


def either(a: Rule, b: Rule) -> Rule:
    """The rule that is True where `a` or `b` is."""
    return lambda row, q_pos, kv_pos: a(row, q_pos, kv_pos) | b(row, q_pos, kv_pos)


class View:
    """Which of `S` slots each of `T` queries may see, in each of `B` rows.

    A query at position q sees the key in a slot at position kv when all of these hold::

        the slot holds a token        kv >= 0
        it is in reach                (kv <= q  and  window.sees(q, kv))
                                      or both are in the same span   (bidirectional images in causal text)
                                      or or_else(row, q, kv)         (overlay from outside)
        same segment                  where segments are given       (packed sequences)
        also(row, q, kv)              where given                    (overlay from outside)
        chosen[row, t, s]             where given                    (an indexer: `restricted`)

    As matrices, one line per query, one column per key (`Near`, for both directions, is not among them)::

        Full()         Sliding(2)     Sliding(2,     Chunked(3)     Full(), a span   Full(),
                                      keep=1)                       over 1..3        segments 0 0 1 1 1
        █ · · · ·      █ · · · ·      █ · · · ·      █ · · · ·      █ · · · ·        █ · · · ·
        █ █ · · ·      █ █ · · ·      █ █ · · ·      █ █ · · ·      █ █ █ █ ·        █ █ · · ·
        █ █ █ · ·      · █ █ · ·      █ █ █ · ·      █ █ █ · ·      █ █ █ █ ·        · · █ · ·
        █ █ █ █ ·      · · █ █ ·      █ · █ █ ·      · · · █ ·      █ █ █ █ ·        · · █ █ ·
        █ █ █ █ █      · · · █ █      █ · · █ █      · · · █ █      █ █ █ █ █        · · █ █ █

    The caller may promise facts that it knows on the host. Two promises make the mask unnecessary; both also say that
    every slot holds a token, so `k` and `v` are read without a copy (without a promise, slots at position -1 may hold
    anything, NaN included):

    - `exact`: each row's keys are consecutive positions in order, the queries are the last T of them, and
      there are no segments or spans.
    - `full`: every query sees every key (an encoder, unpadded cross-attention, a full ring read by one
      token).

    A third promise avoids only the copy of `k` and `v` with unused slots zeroed; the mask is still used:

    - `finite`: slots without a token hold finite values (a source, which is zero past its end).

    >>> import torch
    >>> from lamina.attention import Sliding
    >>> at = torch.arange(4)[None]
    >>> print(View(at, at, Sliding(2)).grid())
      0 1 2 3
    0 █ · · ·
    1 █ █ · ·
    2 · █ █ ·
    3 · · █ █
    """

    def __init__(
        self,
        q_positions: Tensor,  # [B, T]
        kv_positions: Tensor,  # [B, S], -1 for a slot without a token
        window: Window,
        causal: bool = True,
        *,
        q_segments: Tensor | None = None,  # [B, T]
        kv_segments: Tensor | None = None,  # [B, S]
        q_spans: Tensor | None = None,  # [B, T], -1 for tokens in no span
        kv_spans: Tensor | None = None,  # [B, S], -1 for tokens in no span
        exact: bool = False,
        full: bool = False,
        finite: bool = False,
        also: Rule | None = None,
        or_else: Rule | None = None,
    ) -> None:
        self.q_positions, self.kv_positions = q_positions, kv_positions
        self.window, self.causal = window, causal
        self.q_segments, self.kv_segments = q_segments, kv_segments
        self.q_spans, self.kv_spans = q_spans, kv_spans
        self.exact, self.full, self.finite = exact, full, finite
        self.also, self.or_else = also, or_else
        self.chosen: Tensor | None = None  # [B, T, S]
        self._unrestricted: View | None = None  # of which `restricted` made this one
        self._check()
        self._mask: Tensor | None = None
        self._blind: Tensor | None = None
        self._opened: Tensor | None = None
        self._exists: Tensor | None = None
        self._block_mask: BlockMask | None = None
        self._blocks: dict[tuple[int, int], Blocks] = {}
        self._mask_bits: dict[tuple[int, int], MaskBits] = {}
        self.last_bias: tuple[object, Tensor] | None = None  # (bias, its values [B, Hq, T, S]): see `dense_bias`

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, S)."""
        return self.q_positions.shape[0], self.q_positions.shape[1], self.kv_positions.shape[1]

    @property
    def clean(self) -> bool:
        """Promised: no slot holds NaN, since every slot holds a token or is zero."""
        return self.exact or self.full or self.finite

    @property
    def sighted(self) -> bool:
        """Promised: every query sees at least one key (under `exact`, its own)."""
        return self.full or (self.exact and self.also is None and self.chosen is None)

    def restricted(self, chosen: Tensor) -> View:
        """This View where a query sees, of what it saw, only the slots that are True in `chosen` [B, T, S]."""
        if chosen.shape != self.shape:
            raise InputError(
                f"a selection {list(chosen.shape)} for queries and slots {list(self.shape)}: they must agree"
            )
        new = copy(self)
        new.finite, new.full, new.chosen, new._unrestricted = self.clean, False, chosen, self
        new._mask = new._blind = new._opened = new._block_mask = None
        new._blocks, new._mask_bits = {}, {}
        return new

    def part(self, queries: slice, keys: slice = ALL) -> View:
        """The View of some queries over some slots. It shares no lowered form with this one."""

        def of(x: Tensor | None, some: slice) -> Tensor | None:
            return None if x is None else x[:, some]

        new = View(
            self.q_positions[:, queries], self.kv_positions[:, keys], self.window, self.causal,
            q_segments=of(self.q_segments, queries), kv_segments=of(self.kv_segments, keys),
            q_spans=of(self.q_spans, queries), kv_spans=of(self.kv_spans, keys),
            full=self.full, finite=self.clean, also=self.also, or_else=self.or_else,
        )  # fmt: skip
        new.chosen = None if self.chosen is None else self.chosen[:, queries, keys]
        return new

    def lower(self) -> Literal["causal"] | Tensor | None:
        """The simplest equivalent mask: None (every key is seen), "causal" (T == S, lower triangle), or a tensor.

        >>> import torch
        >>> from lamina.attention import Full
        >>> at = torch.arange(4)[None]
        >>> View(at, at, Full(), exact=True).lower()
        'causal'
        >>> View(at[:, 3:], at, Full(), exact=True).lower() is None
        True
        """
        return self.mask() if not self.unmasked else "causal" if self.triangular else None

    @property
    def unmasked(self) -> bool:
        """True if no mask is needed: every query sees every key, or `is_causal` says what it sees."""
        _, T, S = self.shape
        plain = self.exact and self.positional and self.window.spares(S)
        return self.full or (plain and (T == 1 or not self.causal or T == S))

    @property
    def triangular(self) -> bool:
        """True, of an unmasked View, if a query sees itself and the keys before it, and not the later ones."""
        _, T, _ = self.shape
        return not self.full and self.causal and T > 1

    def mask(self) -> Tensor:
        """The whole rule as booleans, [B, 1, T, S]: True where a query sees a key."""
        if self._mask is None:
            if self._unrestricted is not None:
                seen = self._unrestricted.mask()[:, 0]  # which other selections are made of too
            else:
                B, T, S = self.shape
                row = torch.arange(B, device=self.q_positions.device)[:, None, None]
                seen = self._rule(row, lambda x: x[:, :, None], lambda x: x[:, None, :]).expand(B, T, S)
            self._mask = (seen if self.chosen is None else seen & self.chosen)[:, None]
        return self._mask

    def blind(self) -> Tensor:
        """The queries that see no key, [B, 1, T, 1] (padding of an empty row): their output is zero."""
        if self._blind is None:
            self._blind = ~self.mask().any(-1, keepdim=True)
        return self._blind

    def opened(self) -> Tensor:
        """The mask with every key shown to blind queries, for kernels that would divide by zero for them."""
        if self._opened is None:
            self._opened = self.mask() | self.blind()
        return self._opened

    def exists(self) -> Tensor:
        """True for slots that hold a token, [B, 1, S, 1]: broadcasts over k and v."""
        if self._exists is None:
            self._exists = (self.kv_positions >= 0)[:, None, :, None]
        return self._exists

    def block_mask(self) -> BlockMask:
        """The rule for FlexAttention, which skips the blocks of keys that no query sees."""
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            def sees(row: Tensor, head: Tensor, t: Tensor, s: Tensor) -> Tensor:
                seen = self._rule(row, lambda x: x[row, t], lambda x: x[row, s])
                return seen if self.chosen is None else seen & self.chosen[row, t, s]

            B, T, S = self.shape
            self._block_mask = create_block_mask(sees, B, None, T, S, device=self.q_positions.device)
        return self._block_mask

    @property
    def positional(self) -> bool:
        """True if positions, spans and segments decide alone: there is no rule from outside and no selection."""
        return self.also is None and self.or_else is None and self.chosen is None

    def blocks(self, queries: int, keys: int) -> Blocks:
        """Which blocks of keys each block of queries sees, for a kernel; computed once for each pair of sizes."""
        if (queries, keys) not in self._blocks:
            self._blocks[queries, keys] = blocks_of(self, queries, keys)
        return self._blocks[queries, keys]

    def mask_bits(self, queries: int, keys: int) -> MaskBits:
        """The mask as bits, and its blocks, for a kernel; computed once for each pair of sizes."""
        if (queries, keys) not in self._mask_bits:
            self._mask_bits[queries, keys] = mask_bits_of(self, queries, keys)
        return self._mask_bits[queries, keys]

    def grid(self, row: int = 0, limit: int = 24) -> str:
        """One row's mask as text, with positions at the sides ('-': empty slot), shortened with '…' at `limit`."""
        B, T, S = self.shape
        if not 0 <= row < B:
            raise IndexError(f"grid(row={row}): this View has {B} rows, 0 to {B - 1}")
        seen = self.mask()[row, 0].tolist()
        q, kv = self.q_positions[row].tolist(), self.kv_positions[row].tolist()
        left = ["…" if t is None else str(q[t]) for t in _shown(T, limit)]
        top = ["…" if s is None else str(kv[s]) if kv[s] >= 0 else "-" for s in _shown(S, limit)]
        margin, width = max(map(len, left), default=0), max(map(len, top), default=0)
        lines = [" ".join([" " * margin, *(name.rjust(width) for name in top)])]
        for name, t in zip(left, _shown(T, limit), strict=True):
            cells = ["…" if t is None or s is None else "█" if seen[t][s] else "·" for s in _shown(S, limit)]
            lines.append(" ".join([name.rjust(margin), *(cell.rjust(width) for cell in cells)]))
        return "\n".join(lines)

    def __repr__(self) -> str:
        B, T, S = self.shape
        promise = ", exact" * self.exact + ", full" * self.full
        return f"View({B} rows, {T} queries, {S} slots, {self.window}, causal={self.causal}{promise})"

    def _rule(self, row: Tensor, of_q: Callable[[Tensor], Tensor], of_kv: Callable[[Tensor], Tensor]) -> Tensor:
        """The rule of the class docstring. `of_q` indexes a [B, T] tensor by query, `of_kv` a [B, S] tensor by key; the
        rest is elementwise, so the mask and FlexAttention share it."""
        q, kv = of_q(self.q_positions), of_kv(self.kv_positions)
        seen = self.window.sees(q, kv)
        if self.causal:
            seen = seen & (kv <= q)
        if self.q_spans is not None and self.kv_spans is not None:
            span = of_q(self.q_spans)
            seen = seen | ((span >= 0) & (span == of_kv(self.kv_spans)))
        if self.or_else is not None:
            seen = seen | self.or_else(row, q, kv)
        if self.q_segments is not None and self.kv_segments is not None:
            seen = seen & (of_q(self.q_segments) == of_kv(self.kv_segments))
        if self.also is not None:
            seen = seen & self.also(row, q, kv)
        return seen & (kv >= 0)

    def _check(self) -> None:
        q, kv = list(self.q_positions.shape), list(self.kv_positions.shape)
        if len(q) != 2 or len(kv) != 2 or q[0] != kv[0]:
            raise InputError(f"positions are {q} and {kv}: they must be [B, T] and [B, S], with the same B")
        for name, of_q, of_kv in (
            ("segments", self.q_segments, self.kv_segments),
            ("spans", self.q_spans, self.kv_spans),
        ):
            if (of_q is None) != (of_kv is None):
                raise InputError(f"{name} belong to queries and keys: give q_{name} and kv_{name}, or neither")
            if of_q is not None and of_kv is not None and (list(of_q.shape), list(of_kv.shape)) != (q, kv):
                raise InputError(
                    f"{name} are {list(of_q.shape)} and {list(of_kv.shape)}: the positions are {q} and {kv}"
                )
        overlaid = self.q_segments is not None or self.q_spans is not None
        if self.exact and overlaid:
            raise InputError("exact=True promises no segments and no spans: drop them or the promise")
        if self.exact and kv[1] < q[1]:
            raise InputError(f"exact=True promises that the {q[1]} queries are the last of the {kv[1]} keys")
        if self.full and (overlaid or self.also is not None or self.or_else is not None):
            raise InputError("full=True promises that all is seen: drop segments, spans and rules, or it")


def _shown(count: int, limit: int) -> list[int | None]:
    """The indices that `grid` shows: all, or the first and last ones with None for those left out."""
    if count <= limit:
        return list(range(count))
    head = limit // 2
    return [*range(head), None, *range(count - (limit - head - 1), count)]
