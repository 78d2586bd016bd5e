"""Tiny models with fixed random weights, one for each kind of memory: what the laws are tried on.

Widths are a few numbers, windows a few tokens and the arithmetic float64, so that thousands of passes take seconds and
go far past every window. `KINDS` names them all; `toy(kind)` builds one, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina import Model, Source
from lamina.attention.window import Chunked, Full, Sliding, Window
from lamina.cache import (
    Attention,
    Convolution,
    Cross,
    IndexKeys,
    Latent,
    Memory,
    Recurrent,
    Shared,
    SharedIndex,
    Spec,
    Step,
    Tokens,
)
from lamina.cache.codec.codec import Codec, Codecs, Coding
from lamina.cache.counts import Counts
from lamina.cache.layers.base import Key
from lamina.cache.layers.tokens import TokenLayer
from lamina.nn import RMSNorm
from lamina.recurrence import SSD, GatedDelta, Rule, SelectiveScan
from tests.laws.outside import Peak

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 13, 8, 4, 2, 4


class Toy(Model):
    """An embedding, the blocks, a head. Positions enter every block as sines."""

    def __init__(self, *blocks: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.vocab = VOCAB
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        draw = torch.Generator().manual_seed(0)
        for parameter in self.to(dtype).requires_grad_(False).eval().parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * size)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def prepare(self, positions: Tensor) -> Tensor:
        angles = positions[..., None] * torch.tensor([1.0, 0.5, 0.2, 0.07], dtype=self.dtype)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)  # [B, T, WIDTH]

    def unembed(self, x: Tensor) -> Tensor:
        return self.head(x)


class LearnedPositions(Toy):
    """Positions from a table, which ends."""

    max_positions = 10

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.table = nn.Parameter(torch.randn(self.max_positions, WIDTH, dtype=torch.float64), requires_grad=False)

    def prepare(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.table)


class EncoderDecoder(Toy):
    """The encoder is its embedding, shifted by one."""

    def encode(self, ids: Any, counts: Any = None) -> Source:
        ids = torch.as_tensor(ids)
        real = Counts.of(ids.shape[1] if counts is None else counts, len(ids), ids.shape[1], self.device, "counts")
        return Source(self.embedding(ids).roll(1, dims=-1), real.tensor)


def heads(x: Tensor, count: int) -> Tensor:
    """[B, T, count · D] -> [B, count, T, D]"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Attend(nn.Module):
    """Grouped-query attention over a window."""

    def __init__(self, window: Window | None = None, key_dim: int = HEAD_DIM, value_dim: int = HEAD_DIM) -> None:
        super().__init__()
        self.specs = {"attention": Attention(KV_HEADS, key_dim, value_dim, window or Full())}
        self.q = nn.Linear(WIDTH, HEADS * key_dim)
        self.k = nn.Linear(WIDTH, KV_HEADS * key_dim)
        self.v = nn.Linear(WIDTH, KV_HEADS * value_dim)
        self.out = nn.Linear(HEADS * value_dim, WIDTH)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        placed = x + shared
        q, k, v = heads(self.q(placed), HEADS), heads(self.k(placed), KV_HEADS), heads(self.v(x), KV_HEADS)
        return x + self.out(memory.attend(q, k, v, scale=1.0).transpose(1, 2).flatten(2))


class AttendShared(nn.Module):
    """Asks its own questions of another layer's keys and values."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.specs = {"attention": Shared(source)}
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        seen = memory.attend(heads(self.q(x + shared), HEADS), scale=1.0)
        return x + self.out(seen.transpose(1, 2).flatten(2))


class AttendCross(nn.Module):
    """Self-attention, then a look at the source."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Attend()
        self.specs = self.own.specs | {"cross": Cross(KV_HEADS, HEAD_DIM, HEAD_DIM)}
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def cross(self, states: Tensor) -> tuple[Tensor, Tensor]:
        k, v = heads(self.kv(states), 2 * KV_HEADS).chunk(2, dim=1)
        return k, v

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        x = self.own(x, memory["attention"], shared)
        seen = memory.attend(heads(self.q(x), HEADS), scale=1.0, name="cross")
        return x + self.out(seen.transpose(1, 2).flatten(2))


class AttendLatent(nn.Module):
    """Latent attention; `rank` decides when the memory attends in the latent and when it expands it."""

    def __init__(self, rank: int, window: Window | None = None) -> None:
        super().__init__()
        nope, rope = 4, 2
        self.specs = {"attention": Latent(rank, rope, window or Full())}
        self.q = nn.Linear(WIDTH, HEADS * (nope + rope))
        self.down = nn.Linear(WIDTH, rank + rope)
        self.norm = RMSNorm(rank)
        self.up = nn.Parameter(torch.empty(HEADS, nope + HEAD_DIM, rank))
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        angles = 0.7 * memory.positions[..., None].to(x.dtype)
        rope = angles.cos(), angles.sin()
        seen = memory.attend_latent(
            heads(self.q(x + shared), HEADS), self.down(x + shared), norm=self.norm, rope=rope, neighbours=False,
            up=self.up, scale=1.0, restrict=self.selected(x + shared, memory, rope),
        )  # fmt: skip
        return x + self.out(seen.transpose(1, 2).flatten(2))

    def selected(self, x: Tensor, memory: Memory, rope: tuple[Tensor, Tensor]) -> Any:
        return None


class AttendSelected(AttendLatent):
    """Latent attention over `top` tokens that an indexer selects, or over those that layer `source` selected."""

    def __init__(self, top: int = 1, source: int | None = None) -> None:
        super().__init__(rank=6)
        self.source = source
        index = IndexKeys(HEAD_DIM, top=top) if source is None else SharedIndex(source)
        self.specs = {**self.specs, "index": index}
        self.ask, self.tell, self.weigh = (nn.Linear(WIDTH, n) for n in (HEADS * HEAD_DIM, HEAD_DIM, HEADS))

    def selected(self, x: Tensor, memory: Memory, rope: tuple[Tensor, Tensor]) -> Any:
        if self.source is not None:
            return memory.select()
        return memory.select(heads(self.ask(x), HEADS), self.tell(x), self.weigh(x), rope=rope)


class Convolve(nn.Module):
    def __init__(self, kernel: int = 4) -> None:
        super().__init__()
        self.specs = {"convolution": Convolution(WIDTH, kernel)}
        self.weight = nn.Parameter(torch.empty(WIDTH, kernel))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        return x + F.silu(memory.convolve(x + 0.3 * shared, self.weight, self.bias))


class Recur(nn.Module):
    """A recurrence whose inputs are all linear in x, squeezed to where the rule wants them."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.specs = {"state": Recurrent(rule)}
        sizes = {name: torch.Size(shape).numel() for name, shape in rule.input_shapes.items()}
        self.into = nn.ModuleDict({f"to_{name}": nn.Linear(WIDTH, size) for name, size in sizes.items()})
        self.decay = nn.Parameter(torch.empty(self._decay_shape()))
        self.out = nn.Linear(sizes[rule.value], WIDTH)

    def _decay_shape(self) -> tuple[int, ...]:
        match self.rule:
            case SelectiveScan():
                return self.rule.state_shape
            case SSD(heads=heads):
                return (heads,)
        return (1,)

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, shape in self.rule.input_shapes.items():
            y = self.into[f"to_{name}"](x).unflatten(-1, shape)
            match name, self.rule:
                case "dt", _:
                    y = F.softplus(y)
                case "g", _:
                    y = -F.softplus(y)
                case "beta", _:
                    y = y.sigmoid()
                case (("q" | "k"), GatedDelta()):
                    y = F.normalize(y, dim=-1)
            found[name] = y
        return found

    def constants(self) -> dict[str, Tensor]:
        return {} if isinstance(self.rule, GatedDelta) else {"A": -self.decay.exp()}

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        y = memory.recur(self.rule, self.inputs(x + 0.3 * shared), self.constants())
        return x + self.out(y.flatten(2))


class Together(nn.Module):
    """Attention, convolution and state in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.convolve = Attend(Sliding(5)), Convolve(3)
        self.recur = Recur(SSD(heads=2, head_dim=3, state=2, groups=1))
        self.specs: dict[str, Spec] = {**self.attend.specs, **self.convolve.specs, **self.recur.specs}

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        y = self.recur(self.convolve(x, memory["convolution"], shared), memory["state"], shared)
        return (y + self.attend(x, memory, shared)) / 2


class Forgetful(nn.Module):
    """No memory at all."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: dict[str, Spec] = {}
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Index(nn.Module):
    """Weighs every token it recalls by how well it answers the query."""

    def __init__(self, window: Window | None = None) -> None:
        super().__init__()
        self.specs = {"index": Tokens(WIDTH, window or Full())}
        self.ask, self.tell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        kept, seen = memory.recall(self.tell(x + shared))  # [B, S, D], [B, T, S]
        scores = (self.ask(x) @ kept.transpose(1, 2)).masked_fill(~seen, -1e30)
        return x + scores.softmax(dim=-1) @ kept


class Highest(nn.Module):
    """The largest number seen so far in each channel: a kind of memory defined outside the package."""

    def __init__(self) -> None:
        super().__init__()
        self.specs = {"peak": Peak(WIDTH)}

    def forward(self, x: Tensor, memory: Memory, shared: Tensor) -> Tensor:
        return x + 0.5 * memory.call("highest", x + shared)


SCAN, DUAL = SelectiveScan(channels=4, state=3), SSD(heads=4, head_dim=2, state=3, groups=2)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2)

MAKERS: dict[str, Callable[[], Toy]] = {
    "full": lambda: Toy(Attend(), Attend()),
    "sliding": lambda: Toy(Attend(Sliding(4)), Attend(Sliding(4))),
    "sliding of one": lambda: Toy(Attend(Sliding(1)), Attend()),
    "wide heads": lambda: Toy(Attend(None, 40, 32), Attend(Sliding(4), 32, 37)),
    "sliding, keep": lambda: Toy(Attend(Sliding(4, keep=2)), Attend(Sliding(3, keep=5))),
    "sliding and full": lambda: Toy(Attend(Sliding(3)), Attend(), Attend(Sliding(6))),
    "chunked": lambda: Toy(Attend(Chunked(4)), Attend(Chunked(3))),
    "latent": lambda: Toy(AttendLatent(rank=6), AttendLatent(rank=3)),
    "latent, sliding": lambda: Toy(AttendLatent(rank=6, window=Sliding(4)), AttendLatent(rank=20)),
    "latent, selected": lambda: Toy(AttendSelected(3), AttendSelected(source=0), AttendSelected(5), AttendLatent(6)),
    "convolution": lambda: Toy(Convolve(4), Convolve(2), Convolve(1)),
    "selective scan": lambda: Toy(Recur(SCAN), Recur(SCAN)),
    "ssd": lambda: Toy(Recur(DUAL), Recur(DUAL)),
    "gated delta": lambda: Toy(Recur(DELTA), Recur(DELTA)),
    "hybrid": lambda: Toy(Together(), Together()),
    "layers without memory": lambda: Toy(Forgetful(), Attend(Sliding(4)), Forgetful(), Recur(SCAN)),
    "nothing to remember": lambda: Toy(Forgetful(), Forgetful()),
    "cross": lambda: EncoderDecoder(AttendCross(), AttendCross()),
    "shared": lambda: Toy(Attend(), Attend(Sliding(4)), AttendShared(0), AttendShared(1), AttendShared(1)),
    "tokens": lambda: Toy(Index(), Index(Sliding(4))),
    "from outside": lambda: Toy(Highest(), Highest()),
    "from outside, among others": lambda: Toy(Highest(), Attend(Sliding(4)), Recur(DELTA)),
}
KINDS = list(MAKERS)
TOLERANCE = 1e-10  # relative; everything here is float64


@functools.cache
def toy(kind: str, dtype: torch.dtype = torch.float64) -> Toy:
    return MAKERS[kind]().to(dtype)


CODECS: dict[str, Codecs] = {
    "int8": "int8",
    "int4": "int4",
    "k5v4": "k5v4",
    "k6v5": "k6v5",
    "fp8": "fp8",
    "values alone": Codec(values=8),
    "not the first layer": {"default": "k8v4", 0: "plain"},
}


def codec_for(kind: str, codec: str | None) -> str | None:
    """The codec where something of this kind takes one, else None."""
    takes = any(spec.takes_codec for entry in toy(kind).specs for spec in entry.values())
    return codec if takes else None


@functools.lru_cache(maxsize=4096)
def truth(kind: str, ids: tuple[int, ...], source: tuple[int, ...] | None = None, codec: str | None = None) -> Tensor:
    """The uncached logits [T, vocab] of one row by itself, its numbers as `codec` writes them."""
    model = toy(kind)
    given = None if source is None else model.encode([list(source)])
    if codec is None:
        logits = model([list(ids)], source=given)
    else:
        logits = model.forward(torch.tensor([ids]), written(model, len(ids), given, CODECS[codec]))
    assert logits is not None
    return logits[0]


def written(model: Toy, tokens: int, source: Source | None, codec: Codecs) -> Step:
    """A pass without a cache in which every number goes through its codec once, and is not stored anywhere."""
    cached = model.new_cache(codec=codec).layers
    step = Step.alone(model.specs, (1, tokens), model.device)
    for i, entry in enumerate(step.layers):
        for name, bare in entry.items():
            if isinstance(bare, TokenLayer):
                coding: Coding = cached[i][name].coding  # type: ignore[attr-defined]
                bare.extend = functools.partial(_through, coding, bare.extend)  # type: ignore[method-assign]
    if source is not None:
        step.source = {}
        for (i, name), held in model.cross_inputs(source, 1).items():
            kept: Coding = cached[i][name].coding  # type: ignore[attr-defined]
            numbers = {part: held[part] for part in ("k", "v")}
            step.source[i, name] = kept.decode(kept.encode(numbers)) | {"lengths": held["lengths"]}
    return step


def _through(coding: Coding, extend: Callable[..., Any], step: Step, key: Key, new: dict[str, Tensor]) -> Any:
    return extend(step, key, coding.decode(coding.encode(new)))


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, expected: Tensor, what: str = "", limit: float = TOLERANCE) -> None:
    """Relative to the largest number expected; a number that is not finite is never close."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} where {tuple(expected.shape)} was expected"
    if not found.numel():
        return
    assert torch.isfinite(found).all(), f"{what}: not finite"
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= limit, f"{what}: off by {error:.2e}"
