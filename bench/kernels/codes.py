"""Attention over codes on a GPU: right, and how much faster than over bfloat16: `python -m bench.kernels.codes CODEC …`

First every format beside its reference on shapes of real models: ragged and empty rows, wrapped rings, 255 and NaN in
every unused slot. Then times of attention alone over stores of a llama-3.1-8b layer, in several configurations, each
beside the plain kernel in the same run, and of the launch that encodes the new tokens. Stores are more than the
device's cache holds in all. Without a CODEC it is all of them; `--checks` and `--times` do one of the two. Without a
GPU (TRITON_INTERPRET=1): a small check only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

if not torch.cuda.is_available():
    import tests.kernels.conftest  # noqa: F401  (the interpreter, before Triton is imported)

from bench.kernels.attention import Job, do, seconds
from bench.kernels.timing import all_at_once, read_speed
from lamina.attention import Full, Sliding, Window
from lamina.cache.codec.codec import Codec
from lamina.cache.layers.layout import Layout
from lamina.kernels.attention.decode import decode_attention
from lamina.kernels.attention.decode_fused import attend_token
from lamina.kernels.attention.quantized import decode_codes
from lamina.kernels.attention.tiling import Tiling
from lamina.kernels.limits import limits_of
from lamina.kernels.quant.encode import Coded, Side, encode
from lamina.kernels.quant.layout import code_bytes, high_bytes, scale_values
from tests.kernels.stores import Held, Packed, error

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FAST = ("int8", "k8v4", "int4")  # timed in several configurations
CODECS = (*FAST, "int6", "int5", "fp8")
FULL = Full()
BUFFERS = 300e6  # bytes that the stores of one graph have at least


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    lengths: tuple[int, ...]
    window: Window = FULL
    T: int = 1
    counts: tuple[int, ...] | None = None
    softcap: float | None = None
    sinks: bool = False
    shape: Tiling | None = None


CHECKS = [
    Case("llama", (32, 8), (128, 128), (0, 1, 127, 5000)),
    Case("llama, 4 tokens", (32, 8), (128, 128), (0, 63, 5000), T=4, counts=(4, 0, 3)),
    Case("llama, 16 tokens", (32, 8), (128, 128), (9, 5000), T=16),
    Case("gemma", (16, 8), (256, 256), (0, 4095, 4096, 30000), Sliding(4096), softcap=50.0),
    Case("kept first, 5 tokens", (32, 8), (64, 64), (0, 3, 900, 5000), Sliding(800, keep=4), T=5),
    Case("gpt-oss, sinks", (64, 8), (64, 64), (0, 100, 4000), Sliding(128), sinks=True),
    Case("head dims 80 and 96", (32, 32), (80, 96), (0, 100, 3000)),
]
LLAMA = Case("llama", (32, 8), (128, 128), (32768,) * 8)
TIMES = [replace(LLAMA, lengths=(n,) * rows) for rows in (8, 1) for n in (32768, 4096)]
SHAPES = [Tiling(32, 1, 3), Tiling(32, 2, 3), Tiling(64, 2, 3), Tiling(64, 4, 3)]
WAVES = (4, 8)  # programs for each multiprocessor


# -- right? ----------------------------------------------------------------------------------------------------------


def sides(packed: Packed, case: Case) -> tuple[Side, Side]:
    return Side.of(packed.formats.get("k"), case.dims[0]), Side.of(packed.formats.get("v"), case.dims[1])


def check(case: Case, codec: str, dtype: torch.dtype) -> tuple[bool, str]:
    torch.manual_seed(0)
    counts = None if case.counts is None else list(case.counts)
    held = Held.random(
        case.window, list(case.lengths), case.heads[1], case.dims, slots=max(case.lengths) + 64, counts=counts,
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    packed, T, (Hq, Hk) = Packed(held, codec), case.T, case.heads
    hidden = ~held.real(T)[:, :, None, None]
    widths = [(Hq, case.dims[0]), (Hk, case.dims[0]), (Hk, case.dims[1])]
    q, k, v = (
        torch.randn(len(case.lengths), T, *width, device=DEVICE)
        .masked_fill(hidden, torch.nan)
        .to(dtype)
        .transpose(1, 2)
        for width in widths
    )
    sinks = torch.randn(Hq, device=DEVICE) if case.sinks else None
    new, how = [packed.through("k", k), packed.through("v", v)], {"scale": 0.1, "softcap": case.softcap, "sinks": sinks}
    exactly = [packed.through("k", k, exact=True), packed.through("v", v, exact=True)]
    truth = packed.exact.attend(q, exactly, torch.float64, **how)
    plain = error(packed.seen.attend(q, new, dtype, **how), truth, held.real(T))
    coded = encode(q, k, v, packed.table(), *sides(packed, case), write=T == 1 or held.layout.ring is None)
    first, again = (decode_codes(coded, packed.table(), case.window, dtype, shape=case.shape, **how) for _ in range(2))
    ours = error(first, truth, held.real(T)) if first.isfinite().all() else float("inf")
    same = torch.equal(first, again)
    return ours <= max(2 * plain, 5e-6) and same, f"error {ours:.1e}, plain {plain:.1e}" + (
        "" if same else ", NOT REPEATABLE"
    )


def check_encoding(codec: str, dtype: torch.dtype) -> tuple[bool, str]:
    """How many bytes of codes are those that PyTorch writes: another order of sums rounds a few to a neighbour."""
    torch.manual_seed(0)
    case = Case("", (32, 8), (128, 96), (5, 70, 0))
    held = Held.random(FULL, list(case.lengths), 8, case.dims, slots=80, dtype=dtype, device=DEVICE)
    packed = Packed(held, codec)
    q, k, v = (torch.randn(3, h, 1, d, device=DEVICE).to(dtype) for h, d in ((32, 128), (8, 128), (8, 96)))
    encode(q, k, v, packed.table(), *sides(packed, case), write=True)
    same = []
    for name, x in (("k", k), ("v", v)):
        for part, numbers in packed.formats[name].encode(x).items():
            stored = packed.parts[name if part == "codes" else f"{name}.{part}"]
            for row, slot in enumerate(case.lengths):
                same.append((stored[row, :, slot] == numbers[row, :, 0]).float().mean())
    share = float(torch.stack(same).min())
    return share > 0.98, f"{share:.2%} of the bytes of a part as PyTorch writes them, at least"


def checks(codecs: tuple[str, ...]) -> int:
    jobs: list[Job] = []
    for codec in codecs:
        for dtype in (torch.bfloat16, torch.float32) if CUDA else (torch.float32,):
            short = str(dtype).removeprefix("torch.")
            jobs.append((f"{codec} encoding, {short}", partial(check_encoding, codec, dtype)))
            cases = CHECKS if CUDA else [Case("small", (2, 1), (64, 32), (0, 20))]
            for case in cases if dtype == torch.bfloat16 else cases[:1]:
                jobs.append((f"{codec} {case.name}, {case.window}, {short}", partial(check, case, codec, dtype)))
    if CUDA:  # each worker compiles its kernels
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            found = list(pool.imap(do, jobs))
    else:
        found = list(map(do, jobs))
    print("\n".join(line for _, line in found))
    bad = sum(not good for good, _ in found)
    print(f"{bad} of {len(jobs)} failed", flush=True)
    return bad


# -- fast? -----------------------------------------------------------------------------------------------------------


class Store:
    """A layer's random store of one codec, its table, and one new token."""

    def __init__(self, case: Case, codec: str) -> None:
        (Hq, Hk), (D, Dv), rows = case.heads, case.dims, len(case.lengths)
        slots, how = max(case.lengths) + 64, Codec.of(codec)
        self.sides = [
            Side(form, dim, form not in ("plain", "fp8"), centre)
            for form, dim, centre in (
                (how.keys, D, torch.zeros(Hk, D, device=DEVICE) if how.keys != "plain" else None),
                (how.values, Dv, None),
            )
        ]
        self.parts: dict[str, Tensor] = {}
        for name, side in zip("kv", self.sides, strict=True):
            if side.form == "plain":
                self.parts[name] = torch.randn(rows, Hk, slots, side.dim, dtype=torch.bfloat16, device=DEVICE)
                continue
            lead = rows, Hk, slots
            self.parts[name] = torch.randint(
                0, 120, (*lead, code_bytes(side.dim, side.form)), dtype=torch.uint8, device=DEVICE
            )
            width = scale_values(side.dim, side.form)
            self.parts[f"{name}.scales"] = torch.rand(*lead, width, dtype=torch.float16, device=DEVICE) / 64
            if above := high_bytes(side.dim, side.form):
                self.parts[f"{name}.high"] = torch.randint(0, 256, (*lead, above), dtype=torch.uint8, device=DEVICE)
        lengths = torch.tensor(case.lengths, device=DEVICE)
        self.held = Held([self.parts["k"]], Layout(), FULL, lengths, None)
        self.table = self.held.row(self.parts)
        self.new = [
            torch.randn(rows, 1, h, d, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for h, d in ((Hq, D), (Hk, D), (Hk, Dv))
        ]
        self.size = sum(case.lengths) * sum(part[0, 0, 0].nbytes for part in self.parts.values()) * Hk

    def encoded(self) -> Coded:
        return encode(*self.new, self.table, *self.sides, write=True)


def configurations(case: Case, codec: str) -> list[tuple[Tiling, int]]:
    """Shapes, and into how many parts all that is seen is divided."""
    if codec not in FAST:
        return []
    programs = limits_of(torch.device(DEVICE)).multiprocessors
    return [(shape, waves * programs // case.heads[1]) for shape in SHAPES for waves in WAVES]


def times(codecs: tuple[str, ...]) -> None:
    read_speed()
    builds = []
    stores = [(codec, Store(replace(LLAMA, lengths=(64,) * rows), codec)) for codec in codecs for rows in (1, 8)]
    for codec, store in stores:
        coded = store.encoded()
        for shape, parts in [(None, None), *configurations(LLAMA, codec)]:
            how = {"scale": 0.1, "shape": shape, "most_parts": parts}
            builds.append(partial(decode_codes, coded, store.table, FULL, torch.bfloat16, **how))
    for problem in filter(None, all_at_once(builds)):
        print(f"FAILED  {problem}", flush=True)
    for case in TIMES:
        words = f"{len(case.lengths)} x {case.lengths[0]}"
        base = plain_time(case)
        print(f"\n{words}: bfloat16 {base * 1e6:.1f} us", flush=True)
        for codec in codecs:
            for line in coded_times(case, codec, base):
                print(f"  {words:9} {codec:5} {line}", flush=True)
            torch.cuda.empty_cache()


def coded_times(case: Case, codec: str, base: float) -> list[str]:
    """The kernel's own choice, the four best configurations, and the launch that encodes."""
    first = Store(case, codec)
    launches = max(2, min(64, round(BUFFERS / first.size)))
    stores = [first, *(Store(case, codec) for _ in range(launches - 1))]
    coded = [store.encoded() for store in stores]

    def attend(shape: Tiling | None, parts: int | None) -> None:
        for store, one in zip(stores, coded, strict=True):
            decode_codes(one, store.table, FULL, torch.bfloat16, scale=0.1, shape=shape, most_parts=parts)

    def encode_all() -> None:
        for store in stores:
            store.encoded()

    found, failed = [], []
    for shape, parts in [(None, None), *configurations(case, codec)]:
        how = "own choice"
        if shape is not None:
            how = f"block {shape.block}, warps {shape.warps}, stages {shape.stages}, parts {parts}"
        try:
            found.append((seconds(partial(attend, shape, parts), launches, repeats=5), how))
        except Exception as problem:
            failed.append(f"FAILED {how}: {type(problem).__name__}: {str(problem)[:200]}")
    lines = [
        f"{how:52} {took * 1e6:8.1f} us  {first.size / took / 1e12:5.2f} TB/s, {base / took:5.2f} x bfloat16"
        for took, how in [*found[:1], *sorted(found[1:])[:4]]
    ]
    return [*lines, f"encoding {seconds(encode_all, launches) * 1e6:.2f} us", *failed]


def plain_time(case: Case) -> float:
    """Over bfloat16, by the faster of the two kernels for it."""
    first = Store(case, "plain")
    launches = max(2, min(64, round(BUFFERS / first.size)))
    stores = [first, *(Store(case, "plain") for _ in range(launches - 1))]

    def two() -> None:
        for store in stores:
            decode_attention(*store.new, store.table, FULL, scale=0.1)

    def one() -> None:
        for store in stores:
            attend_token(*store.new, None, store.table, FULL, scale=0.1)

    return min(seconds(run, launches, repeats=5) for run in (one, two))


def main() -> None:
    started = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    flags, given = [a for a in sys.argv[1:] if a.startswith("--")], [a for a in sys.argv[1:] if not a.startswith("--")]
    codecs, bad = tuple(given) or CODECS, 0
    if "--times" not in flags:
        bad = checks(codecs)
    if CUDA and "--checks" not in flags:
        times(codecs)
    print(f"{time.perf_counter() - started:.0f} s in all")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
