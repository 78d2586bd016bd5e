"""The attention kernels on a GPU: right, and how near to the memory's speed: `python -m bench.kernels.attention`

First every kernel beside its reference on shapes of real models, in bfloat16 and float32: ragged rows, wrapped rings,
empty rows, NaN in every unused slot. Then times: one CUDA graph of many launches, each over a store of its own, more
than the device's cache holds in all. The share is that of plain reading, measured in the same run. Latent attention is
in `latents.py`. `--checks` does the first alone. Without a GPU (TRITON_INTERPRET=1): the small checks only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

if not torch.cuda.is_available():
    import tests.kernels.conftest  # noqa: F401  (the interpreter, before Triton is imported)

from bench.kernels import latents
from bench.kernels.timing import read_speed
from lamina.attention import Chunked, Full, Sliding, Window
from lamina.kernels.attention import decode as attend
from lamina.kernels.attention import mla as latent
from lamina.kernels.attention.decode import decode_attention
from lamina.kernels.attention.decode_fused import attend_token
from lamina.kernels.attention.rope_append import rotate_and_append
from lamina.kernels.attention.tiling import Tiling
from lamina.nn.attention.rotary import rotate, rotate_neighbours
from tests.kernels.stores import Held, error

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.bfloat16, torch.float32] if CUDA else [torch.float32]
FULL = Full()
BUFFERS = 200e6  # bytes that the stores of one graph have at least


@dataclass(frozen=True)
class Case:
    """One layer of a model, and how much its rows hold."""

    name: str
    heads: tuple[int, int]  # query heads, key heads
    dims: tuple[int, int]  # key and value
    lengths: tuple[int, ...]
    window: Window = FULL
    T: int = 1
    counts: tuple[int, ...] | None = None
    token: bool = False  # by the kernel for one token a row, which stores it too
    slack: int = 0
    softcap: float | None = None
    sinks: bool = False
    splits: int | None = None
    least: int | None = None
    shape: Tiling | None = None

    @property
    def config(self) -> str:
        """What is not as the kernel chooses it itself."""
        shape = self.shape and f"block {self.shape.block}, warps {self.shape.warps}, stages {self.shape.stages}"
        least, splits = self.least and f"least {self.least}", self.splits and f"splits {self.splits}"
        return ", ".join(one for one in (shape, splits, least) if one)


CHECKS = [
    Case("llama", (32, 8), (128, 128), (0, 1, 127, 5000)),
    Case("llama", (32, 8), (128, 128), (0, 63, 5000), T=4, counts=(4, 0, 3)),
    Case("llama", (32, 8), (128, 128), (9, 5000), T=16),
    Case("many rows", (32, 8), (128, 128), tuple(range(0, 9600, 300))),
    Case("gemma", (16, 8), (256, 256), (0, 4095, 4096, 4100, 30000), Sliding(4096), softcap=50.0),
    Case("gemma, 8 tokens", (16, 8), (256, 256), (0, 4095, 4096, 4100, 30000), Sliding(4096), T=8, softcap=50.0),
    Case("kept first", (32, 8), (64, 64), (0, 3, 900, 5000), Sliding(800, keep=4), slack=5),
    Case("kept first, 5 tokens", (32, 8), (64, 64), (0, 3, 900, 5000), Sliding(800, keep=4), T=5),
    Case("llama4, chunks", (40, 8), (128, 128), (0, 8191, 8192, 12000), Chunked(8192), T=3),
    Case("gpt-oss, sinks", (64, 8), (64, 64), (0, 100, 4000), Sliding(128), sinks=True),
    Case("sinks, full", (64, 8), (64, 64), (0, 100, 4000), sinks=True, T=2),
    Case("head dim 80", (32, 32), (80, 80), (0, 100, 3000)),
    Case("head dim 96", (32, 32), (96, 96), (0, 100, 3000)),
    Case("key 192, value 128", (16, 16), (192, 128), (0, 100, 3000), T=2),
    Case("qwen3-next", (16, 2), (256, 256), (0, 100, 9000)),
    Case("one key head", (71, 1), (64, 64), (0, 100, 3000), T=4),
    Case("qwen3-next, much to merge", (16, 2), (256, 256), (0, 9000, 30000), T=4, counts=(4, 0, 3), splits=60),
    Case("falcon-h1", (12, 2), (128, 128), (20000,)),
    Case("falcon-h1", (12, 2), (128, 128), (0, 300, 20000), T=2, splits=66),
]
CHECKS += [replace(case, name=f"{case.name}, stored", token=True) for case in CHECKS if case.T == 1]
LLAMA = Case("llama", (32, 8), (128, 128), (16384,))
LONG = 16384
MANY_ROWS = [
    *((tokens,) * rows for rows in (8, 16, 32) for tokens in (128, 512, 4096)),
    *((LONG, *(200,) * others) for others in (7, 31)),
    *((tokens,) for tokens in (128, 4096, LONG)),
]
FALCON = Case("falcon-h1", (12, 2), (128, 128), (16384,))
NEXT = Case("qwen3-next", (16, 2), (256, 256), (16384,))
TIMES = [
    *(replace(LLAMA, lengths=(n,)) for n in (128, 4096, 16384, 65536)),
    *(replace(case, lengths=(n,)) for case in (FALCON, NEXT) for n in (128, 1024, 16384)),
    *(replace(case, lengths=(128,), least=least) for case in (LLAMA, FALCON, NEXT) for least in (32, 64)),
    *(replace(case, least=least) for case in (FALCON, NEXT) for least in (128, 512, 1024)),
    *(replace(LLAMA, splits=splits, least=least) for splits, least in ((33, 512), (33, 256))),
    *(replace(LLAMA, lengths=(n,) * 8) for n in (128, 4096, 16384)),
    *(replace(LLAMA, lengths=(n,) * 32) for n in (128, 4096)),
    replace(LLAMA, name="llama, one long row of 32", lengths=(16384, *(128,) * 31)),
    replace(LLAMA, name="llama, 4 tokens", T=4),
    *(replace(LLAMA, name="llama, stored", lengths=lengths, token=True) for lengths in MANY_ROWS),
    replace(NEXT, shape=Tiling(64, 4, 2)),
    replace(NEXT, shape=Tiling(32, 8, 3)),
    Case("gemma-2 sliding", (16, 8), (256, 256), (16384,), Sliding(4096), softcap=50.0),
    Case("gemma-2 full", (16, 8), (256, 256), (16384,), softcap=50.0),
    Case("smollm2", (9, 3), (64, 64), (2048,)),
]


# -- right? ----------------------------------------------------------------------------------------------------------


def new_tokens(case: Case, held: Held, dtype: torch.dtype) -> list[Tensor]:
    """q, and the new tokens of each field, NaN where they are padding."""
    B, T, (Hq, Hk) = len(case.lengths), case.T, case.heads
    hidden = ~held.real(T)[:, :, None, None]
    widths = [(Hq, case.dims[0]), (Hk, case.dims[0]), (Hk, case.dims[1])]
    made = (torch.randn(B, T, *width, device=DEVICE).to(dtype).masked_fill(hidden, torch.nan) for width in widths)
    return [x.transpose(1, 2) for x in made]


def stores_of(case: Case, dtype: torch.dtype) -> Held:
    counts = None if case.counts is None else list(case.counts)
    return Held.random(
        case.window, list(case.lengths), case.heads[1], case.dims, slots=max(*case.lengths, 1) + 64,
        counts=counts, slack=case.slack, dtype=dtype, device=DEVICE,
    )  # fmt: skip


def launch(case: Case, table: Tensor, new: list[Tensor], sinks: Tensor | None = None) -> Tensor:
    run = partial(attend_token, *new, None) if case.token else partial(decode_attention, *new)
    return run(
        table, case.window, scale=0.1, softcap=case.softcap, sinks=sinks, most_parts=case.splits, least=case.least,
        shape=case.shape,
    )  # fmt: skip


def reference(case: Case, held: Held, new: list[Tensor], sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    return held.attend(new[0], new[1:], dtype, scale=0.1, softcap=case.softcap, sinks=sinks)


def check(case: Case, dtype: torch.dtype) -> tuple[bool, str]:
    torch.manual_seed(0)
    held = stores_of(case, dtype)
    new = new_tokens(case, held, dtype)
    sinks = torch.randn(case.heads[0], device=DEVICE) if case.sinks else None
    real = held.real(case.T)
    first = launch(case, held.table(), new, sinks)
    again = launch(case, held.table(), new, sinks)
    truth = reference(case, held, new, sinks, torch.float64)
    plain = error(reference(case, held, new, sinks, dtype), truth, real)
    ours = error(first, truth, real) if first.isfinite().all() else float("inf")
    # Beside a row of float32 numbers, the plain computation of few keys can be exact by chance.
    good = ours <= max(2 * plain, 4e-6) and torch.equal(first, again)
    return good, f"error {ours:.1e}, plain {plain:.1e}" + ("" if torch.equal(first, again) else ", NOT REPEATABLE")


def check_rope(dtype: torch.dtype, T: int, dim: int, pairs: int, neighbours: bool, window: Window) -> tuple[bool, str]:
    torch.manual_seed(0)
    lengths = [0, 3, 17, 500]
    held = Held.random(window, lengths, 8, (dim, dim), slots=600, dtype=dtype, device=DEVICE, counts=[T, 0, 1, T])
    q, k, v = torch.randn(4, T, 48, dim, device=DEVICE).to(dtype).transpose(1, 2).split([32, 8, 8], dim=1)
    angles = torch.rand(4, T, pairs, device=DEVICE) * 100
    rope = angles.cos(), angles.sin()
    turn = rotate_neighbours if neighbours else rotate
    stores = held.after([turn(k, rope), v])
    got_q, got_k, _ = rotate_and_append(q, k, v, rope, held.table(), neighbours=neighbours, write=True)
    real = held.real(T)
    errors = [error(got_q, turn(q, rope), real), error(got_k, turn(k, rope), real)]
    whole = real.new_ones(len(lengths), held.slots)
    errors += [error(a.nan_to_num(9), b.nan_to_num(9), whole) for a, b in zip(held.fields, stores, strict=True)]
    return max(errors) <= (8e-3 if dtype == torch.bfloat16 else 1e-6), f"error {max(errors):.1e}"


Job = tuple[str, Callable[[], tuple[bool, str]]]


def jobs() -> list[Job]:
    checks = CHECKS if CUDA else [Case("small", (4, 2), (32, 32), (0, 5, 40), token=token) for token in (False, True)]
    made: list[Job] = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for case in checks:
            made.append((f"{case.name}, {case.T} tokens, {case.window}, {name}", partial(check, case, dtype)))
        for layer in latents.CHECKS if CUDA else latents.SMALL_CHECKS:
            lengths = f"{len(layer.lengths)} rows to {max(layer.lengths)}"
            made.append((f"{layer.name}, {layer.T} tokens, {lengths}, {name}", partial(latents.check, layer, dtype)))
        for T, dim, pairs, neighbours, window in (
            (1, 128, 64, False, Full()),
            (4, 80, 40, False, Full()),
            (1, 64, 32, True, Sliding(100, keep=2)),
            (1, 64, 8, False, Sliding(100)),
        ):
            how = partial(check_rope, dtype, T, dim, pairs, neighbours, window)
            made.append((f"rope {dim}/{pairs}, {T} tokens, {window}, {name}", how))
    return made


broken: list[str] = []  # the job after which this process cannot use the device any more


def do(job: Job) -> tuple[bool, str]:
    name, how = job
    if broken:
        return False, f"LOST    {name}: not run, in the process of {broken[0]}"
    try:
        good, words = how()
    except Exception as problem:
        good, words = False, f"{type(problem).__name__}: {str(problem)[:300]}"
        if "CUDA" in words and "out of memory" not in words:
            broken.append(name)
    return good, f"{'OK    ' if good else 'FAILED'}  {name}: {words}"


# -- fast? -----------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], None], launches: int, repeats: int = 20) -> float:
    """Seconds a launch takes in a captured graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats / launches


def warm(case: Case) -> tuple[bool, str]:
    """Compiles what a timing needs."""
    held = stores_of(case, torch.bfloat16)
    launch(case, held.table(), new_tokens(case, held, torch.bfloat16))
    torch.cuda.synchronize()
    return True, ""


def timing(case: Case, limit: float) -> str:
    span = case.window.span
    tokens = sum(length if span is None else min(length, span) for length in case.lengths)
    width = sum(case.dims) * case.heads[1] * 2
    size = tokens * width
    launches = max(8, min(400, round(BUFFERS / size)))
    held = [stores_of(case, torch.bfloat16) for _ in range(launches)]
    tables, new = [one.table() for one in held], new_tokens(case, held[0], torch.bfloat16)

    def run() -> None:
        for table in tables:
            launch(case, table, new)

    took = seconds(run, launches)
    lengths = str(case.lengths[0]) if len(set(case.lengths)) == 1 else "ragged"
    rate = size / took / 1e12
    speed = f"{took * 1e6:8.2f} us  {size / 1e6:8.2f} MB  {rate:5.2f} TB/s  {rate / limit:6.1%}"
    return f"{case.name:26} {len(case.lengths):3} x {lengths:6} {case.config:40} {speed}"


def rope_timing() -> str:
    held = [
        Held.random(Full(), [100], 8, (128, 128), slots=128, dtype=torch.bfloat16, device=DEVICE) for _ in range(64)
    ]
    tables = [one.table() for one in held]
    q, k, v = torch.randn(1, 48, 1, 128, device=DEVICE).bfloat16().split([32, 8, 8], dim=1)
    rope = torch.rand(1, 1, 64, device=DEVICE), torch.rand(1, 1, 64, device=DEVICE)

    def alone() -> None:
        for table in tables:
            rotate_and_append(q, k, v, rope, table, write=True)

    def both() -> None:
        for table in tables:
            turned = rotate_and_append(q, k, v, rope, table, write=True)
            decode_attention(*turned, table, Full(), scale=0.1)

    one, two = seconds(alone, len(tables)), seconds(both, len(tables))
    return f"rope and append, llama, 1 row: {one * 1e6:.2f} us; with attention over 100 tokens: {two * 1e6:.2f} us"


def main() -> None:
    started = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    bad, checks_only = 0, "--checks" in sys.argv[1:]
    if CUDA:
        # Each worker compiles its kernels into the cache on disk, where this process finds them for the times.
        shapes = {replace(case, lengths=(64,) * len(case.lengths)) for case in TIMES}
        layers = {replace(case, lengths=(64,) * len(case.lengths)) for case in latents.TIMES}
        builds: list[Job] = [(f"compile {case.name} {case.config}", partial(warm, case)) for case in shapes]
        builds += [(f"compile {case.name} {case.config}", partial(latents.warm, case)) for case in layers]
        builds = [] if checks_only else builds
        with multiprocessing.get_context("spawn").Pool(14) as pool:
            warming = pool.map_async(do, builds, chunksize=1)
            for good, line in pool.imap(do, jobs()):
                print(line, flush=True)
                bad += not good
            for good, line in warming.get():
                if not good:
                    print(line, flush=True)
    else:
        for good, line in map(do, jobs()):
            print(line, flush=True)
            bad += not good
    print(f"{bad} failed, {time.perf_counter() - started:.0f} s", flush=True)
    if CUDA and not checks_only:
        limit = read_speed()
        print(f"own shapes: {attend.SHAPES} {latent.SHAPES}")
        times: list[tuple[str, Callable[[], str]]] = [("rope", rope_timing)]
        for case in TIMES:
            times.append((f"{case.name} {case.config}", partial(timing, case, limit)))
        for layer in latents.TIMES:
            how = partial(latents.timing, layer, seconds, limit * 1e12, BUFFERS)
            times.append((f"{layer.name} {layer.config}", how))
        for name, take in times:
            try:
                print(take(), flush=True)
            except Exception as problem:
                print(f"FAILED  {name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            torch.cuda.empty_cache()
        print(f"{time.perf_counter() - started:.0f} s in all")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
