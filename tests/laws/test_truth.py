"""The truth of the laws, checked by itself: the uncached pass of each toy equals its formula, token by token.

Nothing of the cache, of attention or of the recurrences is used here but the toys' own weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.attention.window import Chunked, Full, Sliding, Window
from tests.laws.toys import (
    DELTA,
    DUAL,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCAN,
    Attend,
    Convolve,
    Recur,
    Toy,
    assert_close,
    random_ids,
    toy,
    truth,
)  # fmt: skip

Rows = list[Tensor]  # one vector a token


def visible(window: Window, q: int, kv: int) -> bool:
    match window:
        case Full():
            return kv <= q
        case Sliding(size=size, keep=keep):
            return kv <= q and (q - kv < size or kv < keep)
        case Chunked(size=size):
            return kv <= q and (q - q % size) <= kv
    raise AssertionError(window)


def attend(block: Any, x: Rows, places: Rows) -> Rows:
    window, out = block.specs["attention"].window, []
    for t in range(len(x)):
        seen = [s for s in range(len(x)) if visible(window, t, s)]
        query = block.q(x[t] + places[t]).view(HEADS, HEAD_DIM)
        mixed = []
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            keys = [block.k(x[s] + places[s]).view(KV_HEADS, HEAD_DIM)[g] for s in seen]
            values = [block.v(x[s]).view(KV_HEADS, HEAD_DIM)[g] for s in seen]
            shares = [math.exp(float(query[h] @ key)) for key in keys]
            mixed.append(sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares))
        out.append(x[t] + block.out(torch.cat(mixed)))
    return out


def convolve(block: Any, x: Rows, places: Rows) -> Rows:
    taps = block.weight.shape[1]
    out = []
    for t in range(len(x)):
        total = block.bias.clone()
        for back in range(min(taps, t + 1)):
            total += block.weight[:, taps - 1 - back] * (x[t - back] + 0.3 * places[t - back])
        out.append(x[t] + F.silu(total))
    return out


def recur(block: Any, x: Rows, places: Rows) -> Rows:
    rule, constants, out = block.rule, block.constants(), []
    state = torch.zeros(rule.state_shape, dtype=torch.float64)
    for t in range(len(x)):
        token = block.inputs(x[t] + 0.3 * places[t])
        y, state = NEXT[rule](state, token, constants)
        out.append(x[t] + block.out(y.flatten()))
    return out


def scan(h: Tensor, token: dict[str, Tensor], constants: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    new, y = torch.empty_like(h), torch.zeros(h.shape[0], dtype=h.dtype)
    for c in range(h.shape[0]):
        for n in range(h.shape[1]):
            dt = token["dt"][c]
            new[c, n] = torch.exp(dt * constants["A"][c, n]) * h[c, n] + dt * token["B"][n] * token["x"][c]
            y[c] += token["C"][n] * new[c, n]
    return y, new


def dual(h: Tensor, token: dict[str, Tensor], constants: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    new, y = torch.empty_like(h), torch.empty(h.shape[:2], dtype=h.dtype)
    for head in range(h.shape[0]):
        group, dt = head // (DUAL.heads // DUAL.groups), token["dt"][head]
        added = dt * torch.outer(token["x"][head], token["B"][group])
        new[head] = torch.exp(dt * constants["A"][head]) * h[head] + added
        y[head] = new[head] @ token["C"][group]
    return y, new


def delta(h: Tensor, token: dict[str, Tensor], constants: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    new, y = torch.empty_like(h), torch.empty(h.shape[0], h.shape[2], dtype=h.dtype)
    for head in range(h.shape[0]):
        key_head = head // (DELTA.value_heads // DELTA.key_heads)
        k, q = token["k"][key_head], token["q"][key_head]
        kept = torch.exp(token["g"][head]) * h[head]
        new[head] = kept + torch.outer(k, token["beta"][head] * (token["v"][head] - k @ kept))
        y[head] = q @ new[head]
    return y, new


NEXT: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {SCAN: scan, DUAL: dual, DELTA: delta}


def by_hand(model: Toy, ids: list[int]) -> Tensor:
    places = list(model.prepare(torch.arange(len(ids))[None])[0])
    x = list(model.embedding.weight[ids])
    for block in model.blocks:
        match block:
            case Attend():
                x = attend(block, x, places)
            case Convolve():
                x = convolve(block, x, places)
            case Recur():
                x = recur(block, x, places)
    return torch.stack([model.head(one) for one in x])


@pytest.mark.parametrize(
    "kind",
    ["full", "sliding", "sliding, keep", "chunked", "convolution", "selective scan", "ssd", "gated delta"],
)  # fmt: skip
def test_the_uncached_pass_is_the_formula(kind: str) -> None:
    ids = random_ids(1, 14, seed=5)[0].tolist()
    assert_close(truth(kind, tuple(ids)), by_hand(toy(kind), ids), kind)
