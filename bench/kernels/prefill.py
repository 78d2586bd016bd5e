"""Attention of many queries on a GPU, by every way there is: `python -m bench.kernels.prefill [tiles]`

Each line is a shape of queries and keys, a way, its milliseconds, TFLOP/s of the scores that are seen, and its error
beside that of a plain computation in float32. With "tiles", our kernel also with other tiles than its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernels.timing import all_at_once
from lamina.attention import Full, Sliding, View, Window
from lamina.kernels.attention.prefill.many import Tile, attend_many, tile_for
from lamina.kernels.limits import limits_of

BF16, EVERYTHING = torch.bfloat16, Full()
TILES = [
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(128, 64, 8, 3),
    Tile(128, 64, 4, 3),
    Tile(64, 64, 4, 3),
    Tile(128, 64, 8, 2),
]


@dataclass(frozen=True)
class Shape:
    name: str
    queries: int
    keys: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    window: Window = EVERYTHING
    softcap: float | None = None
    rows: tuple[int, ...] = ()  # lengths of ragged rows, all new

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, View]:
        torch.manual_seed(0)
        B = len(self.rows) or 1
        q = torch.randn(B, self.queries, self.heads[0], self.dim, device="cuda", dtype=BF16).transpose(1, 2)
        k, v = (torch.randn(B, self.heads[1], self.keys, self.dim, device="cuda", dtype=BF16) for _ in range(2))
        at, old = torch.arange(self.keys, device="cuda"), self.keys - self.queries
        if not self.rows:
            return q, k, v, View(at[None, old:], at[None], self.window, exact=True)
        ends = torch.tensor(self.rows, device="cuda")[:, None]
        return q, k, v, View(torch.where(at < ends, at, 0), torch.where(at < ends, at, -1), self.window)

    @property
    def flops(self) -> float:
        """Of the products over all pairs that are seen."""
        size = self.window.size if isinstance(self.window, Sliding) else 1 << 40
        ends = [range(1, length + 1) for length in self.rows] or [range(self.keys - self.queries + 1, self.keys + 1)]
        return 4 * self.heads[0] * self.dim * sum(min(seen, size) for row in ends for seen in row)


SHAPES = [
    Shape("llama whole", 8192, 8192),
    Shape("llama 2,048", 2048, 2048),
    Shape("llama chunk behind a cache", 4096, 32_768),
    Shape("llama short chunk", 512, 8192),
    Shape("llama ragged", 1024, 1024, rows=tuple(100 + 924 * i // 63 for i in range(64))),
    Shape("gemma-2 full", 8192, 8192, (16, 8), 256, softcap=50.0),
    Shape("gemma-2 sliding", 8192, 8192, (16, 8), 256, window=Sliding(4096), softcap=50.0),
    Shape("mistral sliding", 8192, 8192, window=Sliding(1024)),
    Shape("heads of 64", 8192, 8192, (32, 8), 64, window=Sliding(8000)),
]  # fmt: skip
Way = Callable[[], Tensor]


def ways(shape: Shape, tiles: bool) -> Iterator[tuple[str, Way]]:
    q, k, v, view = shape.tensors()
    scale = shape.dim**-0.5

    def ours(tile: Tile | None) -> Way:
        return lambda: attend_many(q, k, v, view, scale=scale, softcap=shape.softcap, tile=tile)

    def by(backend: SDPBackend, **how: object) -> Way:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **how)

        return run

    yield f"ours, {tile_for(shape.queries, shape.dim, shape.dim, 2, limits_of(q.device))}", ours(None)
    if tiles:
        for tile in TILES:
            yield f"ours, {tile}", ours(tile)
    if shape.softcap is None and isinstance(shape.window, Full) and not shape.rows:
        if shape.queries == shape.keys:
            yield "cuDNN, is_causal", by(SDPBackend.CUDNN_ATTENTION, is_causal=True)
            yield "flash, is_causal", by(SDPBackend.FLASH_ATTENTION, is_causal=True)
        else:
            yield (
                "flash, lower right",
                lambda: F.scaled_dot_product_attention(
                    q, k, v, attn_mask=causal_lower_right(shape.queries, shape.keys), scale=scale, enable_gqa=True
                ),
            )
            yield "cuDNN, two parts", lambda: two_parts(q, k, v, scale)


def two_parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    parts = [(k[:, :, : S - T], v[:, :, : S - T], False), (k[:, :, S - T :], v[:, :, S - T :], True)]
    found = [
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, a, b, None, True, 0.0, causal, False, scale=scale)[:2]
        for a, b, causal in parts
    ]
    (a, la), (b, lb) = found
    share = torch.sigmoid(la.view(*q.shape[:3], 1) - lb.view(*q.shape[:3], 1)).to(a.dtype)
    return a * share + b * (1 - share)


def truth(shape: Shape) -> Tensor:
    """Of the last 64 queries of a row, in float32."""
    q, k, v, view = shape.tensors()
    mask = view.mask()[:1, :, -64:] if not shape.rows else view.mask()[-1:, :, -64:]
    at = slice(-1, None)
    k, v = (x[at].repeat_interleave(shape.heads[0] // shape.heads[1], 1).float() for x in (k, v))
    scores = q[at, :, -64:].float() @ k.transpose(-1, -2) * shape.dim**-0.5
    if shape.softcap is not None:
        scores = shape.softcap * (scores / shape.softcap).tanh()
    return torch.where(mask, scores, float("-inf")).softmax(-1) @ v


def milliseconds(way: Way) -> float:
    way()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        start.record()
        way()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[2]


def main(tiles: bool) -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bfloat16\n")
    print("| shape | way | ms | TFLOP/s | error |\n|---|---|---|---|---|")
    for shape in SHAPES:
        found = list(ways(shape, tiles))
        all_at_once([way for _, way in found])
        expected = truth(shape)
        for name, way in found:
            try:
                ms = milliseconds(way)
                error = float((way()[-1:, :, -64:].float() - expected).abs().max())
            except Exception as failure:
                print(f"| {shape.name} | {name} | {type(failure).__name__}: {str(failure)[:120]} | | |", flush=True)
                continue
            speed = shape.flops / ms / 1e9
            print(f"| {shape.name} | {name} | {ms:.3f} | {speed:.0f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["tiles"])
