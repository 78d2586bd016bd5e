"""The kernels of latent attention, as `python -m bench.kernels.attention` checks and times them.

A check goes all the way, from what the product in front gives to each head's values, in bfloat16 and float32, beside
PyTorch in float64 and in the same number format: ragged rows, empty rows, NaN in every unused slot. A time is that of
the three launches of a layer, each layer with a store and weights of its own; then of attention alone, and of the way
in alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lamina.attention import Full
from lamina.attention.rotary import rotate, rotate_neighbours
from lamina.kernels.attention.mla import LatentSplits, decode_latent
from lamina.kernels.attention.mla_project import COLUMNS, STRETCH, into_latent, out_of_latent
from lamina.kernels.attention.tiling import Tiling
from tests.kernels.stores import Held, error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS, SCALE = 1e-6, 0.1
Seconds = Callable[[Callable[[], None], int], float]


@dataclass(frozen=True)
class Case:
    """One layer of a model, how much its rows hold, and how its kernels are launched."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 16
    rank: int = 512
    rope: int = 64
    nope: int = 128
    values: int = 128  # of a head
    T: int = 1
    counts: tuple[int, ...] | None = None
    neighbours: bool = True
    shape: Tiling | None = None
    splits: int | None = None
    least: int | None = None
    ahead: bool = True
    stretch: int = STRETCH
    columns: int = COLUMNS  # numbers of a latent that one program takes out
    stages: int = 4

    @property
    def config(self) -> str:
        """What is not as the kernels choose it themselves."""
        shape = self.shape and f"block {self.shape.block}, warps {self.shape.warps}, stages {self.shape.stages}"
        found = [
            shape,
            self.splits and f"splits {self.splits}",
            self.least and f"least {self.least}",
            "" if self.ahead else "nothing ahead",
            "" if self.stretch == STRETCH else f"in: {self.stretch} bytes",
            self.columns != COLUMNS and f"out: {self.columns} columns",
            "" if self.stages == 4 else f"out: stages {self.stages}",
        ]
        return ", ".join(one for one in found if one)


LITE = Case("deepseek-v2-lite", (16384,))
CHECKS = [
    replace(LITE, lengths=(0, 1, 63, 64, 100, 9000)),
    replace(LITE, lengths=(30000,)),
    replace(LITE, lengths=(129,), neighbours=False),
    replace(LITE, lengths=(0, 100, 9000), T=4, counts=(4, 0, 2)),
    replace(LITE, lengths=tuple(range(0, 6000, 500)), counts=(1,) * 11 + (0,)),
    replace(LITE, name="all tokens of 16", lengths=(70, 2000), T=16, counts=(16, 9)),
    Case("deepseek-v3", (0, 100, 5000), heads=128),
    Case("deepseek-v3", (20000,), heads=128),
    Case("small and odd", (0, 5, 300), heads=5, rank=40, rope=6, nope=12, values=10),
]
SMALL_CHECKS = [Case("small", (0, 40), heads=2, rank=32, rope=4, nope=8, values=10)]  # without a GPU
# Not (64, 4, 1): ptxas 12.8 runs out of registers for it and loses addresses, which is an illegal access.
TIMES = [
    *(replace(LITE, lengths=(n,)) for n in (128, 4096, 16384, 65536)),
    *(replace(LITE, lengths=(n,) * 8) for n in (128, 4096, 16384)),
    replace(LITE, lengths=(128,) * 32),
    *(replace(LITE, shape=Tiling(*shape)) for shape in ((64, 8, 2), (32, 4, 3), (32, 8, 3), (32, 8, 5), (32, 4, 5))),
    *(replace(LITE, lengths=(n,), ahead=False) for n in (128, 4096, 16384, 65536)),
    replace(LITE, shape=Tiling(32, 8, 5), ahead=False),
    *(replace(LITE, splits=splits) for splits in (32, 64, 96)),
    *(replace(LITE, lengths=(n,), least=128) for n in (128, 4096)),
    replace(LITE, lengths=(4096,), least=32, shape=Tiling(32, 8, 5)),
    *(replace(LITE, columns=columns) for columns in (32, 128)),
    replace(LITE, stages=2),
    replace(LITE, stages=6),
    *(replace(LITE, stretch=stretch) for stretch in (64, 256)),
    Case("deepseek-v3", (16384,), heads=128),
    Case("deepseek-v3", (16384,), heads=128, shape=Tiling(32, 8, 3)),
]


@dataclass
class Layer:
    """What one layer's launches read: random weights, a random store, and what the product in front gave."""

    case: Case
    held: Held
    q: Tensor  # [B, H, T, N + P]
    kv: Tensor  # [B, T, rank + P]
    up: Tensor  # [H, N + V, rank]
    weight: Tensor  # [rank]
    rope: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, case: Case, dtype: torch.dtype) -> Layer:
        B, T, width = len(case.lengths), case.T, case.rank + case.rope
        counts = None if case.counts is None else list(case.counts)
        slots = max(*case.lengths, 1) + 64
        held = Held.random(
            Full(), list(case.lengths), 1, (width,), slots=slots, counts=counts, dtype=dtype, device=DEVICE
        )
        both = torch.randn(B, T, case.heads * (case.nope + case.rope) + width, device=DEVICE)
        both = both.masked_fill(~held.real(T)[..., None], torch.nan).to(dtype)
        q, kv = both.tensor_split([-width], dim=-1)
        up = torch.randn(case.heads, case.nope + case.values, case.rank, device=DEVICE) * case.nope**-0.5
        weight = 1 + 0.1 * torch.randn(case.rank, device=DEVICE)
        angles = 100 * torch.rand(B, T, case.rope // 2, device=DEVICE)
        q = q.unflatten(-1, (case.heads, -1)).transpose(1, 2)
        return cls(case, held, q, kv, up.to(dtype), weight.to(dtype), (angles.cos(), angles.sin()))

    def come_in(self, table: Tensor) -> tuple[Tensor, Tensor]:
        case = self.case
        return into_latent(
            self.q, self.kv, self.up[:, : case.nope], self.weight, EPS, self.rope, table,
            neighbours=case.neighbours, stretch=case.stretch,
        )  # fmt: skip

    def attend(self, table: Tensor, q: Tensor, new: Tensor) -> LatentSplits:
        case = self.case
        return decode_latent(
            q, new, table, rank=case.rank, scale=SCALE, most_splits=case.splits, shape=case.shape, least=case.least,
            ahead=case.ahead,
        )  # fmt: skip

    def run(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's values [B, H, T, V], and the new tokens."""
        q, new = self.come_in(table)
        parts = self.attend(table, q, new)
        case = self.case
        return out_of_latent(parts, self.up[:, case.nope :], table, columns=case.columns, stages=case.stages), new

    def plainly(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same by PyTorch in `dtype`."""
        case, turn = self.case, rotate_neighbours if self.case.neighbours else rotate
        q, kv, up, weight = (x.to(dtype) for x in (self.q, self.kv, self.up, self.weight))
        exact = torch.promote_types(dtype, torch.float32)
        latent = kv[..., : case.rank].to(exact)
        latent = latent * (latent.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.to(exact)
        new = torch.cat([latent.to(dtype), turn(kv[:, None, :, case.rank :], self.rope)[:, 0]], dim=-1)
        q = torch.cat([q[..., : case.nope] @ up[:, : case.nope], turn(q[..., case.nope :], self.rope)], dim=-1)
        held, keys = self.held, new[:, None]
        fields = [x.to(dtype) for x in (held.fields[0], held.fields[0][..., : case.rank])]
        both = Held(fields, held.layout, held.window, held.lengths, held.counts)
        seen = both.attend(q, [keys, keys[..., : case.rank]], dtype, scale=SCALE).to(dtype)
        return seen @ up[:, case.nope :].mT, new


def check(case: Case, dtype: torch.dtype) -> tuple[bool, str]:
    torch.manual_seed(0)
    layer = Layer.random(case, dtype)
    real, table = layer.held.real(case.T), layer.held.table()
    truth, new_truth = layer.plainly(torch.float64)
    plain, new_plain = layer.plainly(dtype)
    stores = layer.held.after([new_plain[:, None]])
    first, new = layer.run(table)
    again, _ = layer.run(table)
    allowed = error(plain, truth, real)
    ours = error(first, truth, real) if first.isfinite().all() else float("inf")
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-6
    coming = error(new[:, None], new_truth[:, None], real)
    whole = torch.ones(layer.held.fields[0].shape[:1] + layer.held.fields[0].shape[2:3], dtype=torch.bool)
    kept = error(layer.held.fields[0].nan_to_num(9), stores[0].nan_to_num(9), whole.to(DEVICE))
    same = torch.equal(first, again)
    good = ours <= max(2 * allowed, 4e-6) and coming <= rounding and kept <= rounding and same
    words = f"error {ours:.1e}, plain {allowed:.1e}, new tokens {coming:.1e}, stored {kept:.1e}"
    return good, words + ("" if same else ", NOT REPEATABLE")


def warm(case: Case) -> tuple[bool, str]:
    """Compiles what a timing needs."""
    layer = Layer.random(replace(case, lengths=(64,) * len(case.lengths)), torch.bfloat16)
    layer.run(layer.held.table())
    torch.cuda.synchronize()
    return True, ""


def timing(case: Case, seconds: Seconds, read: float, buffers: float) -> str:
    weights = case.heads * (case.nope + case.values) * case.rank * 2
    size = sum(case.lengths) * (case.rank + case.rope) * 2
    launches = max(4, min(100, round(buffers / (size + weights))))
    layers = [Layer.random(case, torch.bfloat16) for _ in range(launches)]
    tables = [layer.held.table() for layer in layers]
    ready = [layer.come_in(table) for layer, table in zip(layers, tables, strict=True)]

    def whole() -> None:
        for layer, table in zip(layers, tables, strict=True):
            layer.run(table)

    def attention() -> None:
        for layer, table, (q, new) in zip(layers, tables, ready, strict=True):
            layer.attend(table, q, new)

    def coming() -> None:
        for layer, table in zip(layers, tables, strict=True):
            layer.come_in(table)

    took, alone, entering = (seconds(run, launches) for run in (whole, attention, coming))
    return (
        f"{case.name:18} {len(case.lengths):3} x {case.lengths[0]:6} {case.config:40} {took * 1e6:8.2f} us, limit "
        f"{(size + weights) / read * 1e6:7.2f}; attention alone {alone * 1e6:8.2f} us, {size / alone / 1e12:5.2f} TB/s "
        f"{size / alone / read:6.1%}; way in alone {entering * 1e6:6.2f} us"
    )
