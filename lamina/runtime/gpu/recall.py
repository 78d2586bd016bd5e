"""`memory.recall` of a captured step, pass or prompt: storing token vectors, and reading back those that are seen.

Model code gets a tensor, whose shape a CUDA graph fixes: for each row the committed vectors that its new tokens see,
in the order of positions and followed by zeros, then the new ones. There is room for the tokens of the window,
or for `Captured.room` where all tokens stay visible; a program whose rows outgrow that is captured again.
Codes are quantized and dequantized by PyTorch, as in plain passes; kernels copy them (`kernels/attention/recall.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.attention.view import View
from lamina.cache.layers.token_store import column_of

if TYPE_CHECKING:
    from lamina.runtime.captured import Captured
    from lamina.runtime.gpu.backend import TableEntry


def recall(one: Captured, entry: TableEntry, x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, T, D] -> vectors [B, S, D], and which of them each new token sees, bool [B, T, S]"""
    from lamina.kernels.attention.prompt.store import store_tokens  # imports Triton, as the next does
    from lamina.kernels.attention.recall import recall_part

    (rows, tokens, dim), spec, table, page = x.shape, entry.spec, entry.table, entry.page
    coding, dtype = entry.coding, one.model.dtype
    new = coding.encode({"x": x.to(dtype)})
    room, committed, at = one.room_of(spec.window), dict[str, Tensor](), None
    for name, (width, kind) in coding.parts("x", dim, dtype).items():
        committed[name], at = recall_part(table, column_of(name), rows, room, width, kind, spec.window, page)
    assert at is not None

    def store(table: Tensor) -> None:
        for name, part in new.items():
            store_tokens(part[:, None], None, table, page, column_of(name))

    # A ring still holds tokens that other new ones see, so of several tokens it is written when the pass commits.
    if spec.window.span is None or (tokens == 1 and entry.later is None):
        store(table)
    else:
        entry.at_commit = lambda: store(table if entry.later is None else entry.later)
    valid = one.valid
    if valid is None:
        valid = torch.arange(tokens, device=x.device) < one.counts[:, None]
    at = torch.cat([at, one.positions.masked_fill(~valid, -1)], dim=1)  # [B, S]
    vectors = torch.cat([coding.decode(committed)["x"], coding.decode(new)["x"]], dim=1)
    seen = View(one.positions, at, spec.window).mask()[:, 0]
    return vectors.masked_fill((at < 0)[..., None], 0), seen
