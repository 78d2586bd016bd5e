"""The recurrent kernels on a GPU: right, and how near to the memory's speed: `python -m bench.kernels.recurrent`

First every kernel beside its reference on shapes of real models, in bfloat16 and float32. Then times: one CUDA graph of
as many launches as there are layers, each with a state of its own, more than the device's cache holds in all. The share
is that of a plain copy, measured in the same run. Without a GPU (TRITON_INTERPRET=1): small shapes, no times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lamina.kernels.conv import convolve_step
from lamina.kernels.recur import Tile, gated_delta_step, recur_step, selective_scan_step, ssd_step
from lamina.recurrence import SSD, GatedDelta, Rule, SelectiveScan, causal_convolution_by_steps
from lamina.recurrence.gated_delta import unit_length as unit

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TIMES = 2 if CUDA else 4  # the error of the plain computation; the interpreter cuts off what the device rounds
RULES: dict[str, Rule] = {
    "mamba2-2.7b": SSD(heads=80, head_dim=64, state=128, groups=1),
    "falcon-h1-7b": SSD(heads=24, head_dim=128, state=256, groups=1),
    "qwen3-next": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    "mamba-2.8b": SelectiveScan(channels=5120, state=16),
}
SMALL: dict[str, Rule] = {
    "ssd": SSD(heads=2, head_dim=8, state=16, groups=1),
    "delta": GatedDelta(key_heads=1, value_heads=2, key_dim=16, value_dim=8),
    "scan": SelectiveScan(channels=24, state=4),
}
CONVOLUTIONS = {"mamba2-2.7b": (5376, 4), "falcon-h1-7b": (3584, 4), "qwen3-next": (8192, 4), "lfm2": (2048, 3)}
TILES: dict[type[Rule], list[Tile]] = {
    SSD: [Tile(512, 2), Tile(512, 4), Tile(1024, 2), Tile(1024, 4), Tile(2048, 4), Tile(4096, 4), Tile(8192, 8)],
    GatedDelta: [Tile(1024, 4), Tile(2048, 2), Tile(2048, 4), Tile(4096, 4), Tile(4096, 8), Tile(8192, 8)],
    SelectiveScan: [Tile(128, 1), Tile(256, 2), Tile(512, 2), Tile(512, 4), Tile(1024, 4), Tile(2048, 4)],
}
BLOCKS = [(32, 1), (64, 2), (128, 4), (128, 2), (256, 4)]
STEPS: dict[type[Rule], Callable[..., Tensor]] = {
    SSD: ssd_step, GatedDelta: gated_delta_step, SelectiveScan: selective_scan_step,
}  # fmt: skip
Inputs = dict[str, Tensor]


# -- inputs ----------------------------------------------------------------------------------------------------------


def table_of(store: Tensor, counts: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    slots = store.shape[1]
    numbers = [store.data_ptr(), 0, slots, slots, 0, *(0 if x is None else x.data_ptr() for x in (lengths, counts)), 0]
    return torch.tensor(numbers, device=store.device)


def projected(rule: Rule, rows: int, tokens: int, dtype: torch.dtype) -> Inputs:
    """Inputs as a mixer has them before step sizes, gates and norms: slices of one tensor."""
    sizes = {name: torch.Size(shape).numel() for name, shape in rule.input_shapes.items()}
    parts = torch.randn(rows, tokens, sum(sizes.values()), device=DEVICE).to(dtype).split(list(sizes.values()), -1)
    return {n: part.unflatten(-1, rule.input_shapes[n]) for n, part in zip(sizes, parts, strict=True)}


def prepared(rule: Rule, raw: Inputs, extra: dict[str, Any]) -> Inputs:
    """What the rule itself takes: the operations that the kernels can do on the way, one by one."""
    if isinstance(rule, GatedDelta):
        A, bias = extra["gates"]
        q, k = unit(raw["q"]) * rule.key_dim**-0.5, unit(raw["k"])
        return {**raw, "q": q, "k": k, "g": A * F.softplus(raw["g"] + bias), "beta": raw["beta"].sigmoid()}
    low, high = extra.get("dt_limit", (0.0, torch.inf))
    return {**raw, "dt": F.softplus(raw["dt"] + extra["dt_bias"]).clamp(low, high)}


def parameters(rule: Rule) -> tuple[Inputs, dict[str, Any]]:
    """-> constants, keywords for what is done on the way"""
    heads = rule.input_shapes["g" if isinstance(rule, GatedDelta) else "dt"][0]
    bias, some = torch.randn(heads, device=DEVICE) - 2, torch.randn(heads, device=DEVICE)
    if isinstance(rule, GatedDelta):
        return {}, {"gates": (-some.exp(), bias), "unit": True}
    shape = rule.state_shape if isinstance(rule, SelectiveScan) else (heads,)
    limit = {"dt_limit": (0.001, 0.5)} if isinstance(rule, SSD) else {}
    return {"A": -torch.randn(shape, device=DEVICE).exp()}, {"skip": some, "dt_bias": bias, **limit}


def finish(rule: Rule, y: Tensor, x: Tensor, extra: dict[str, Any]) -> Tensor:
    """The operations behind the rule."""
    if "skip" not in extra:
        return y
    return y + (extra["skip"][:, None] if isinstance(rule, SSD) else extra["skip"]) * x


# -- right? ----------------------------------------------------------------------------------------------------------


def distance(a: Tensor, b: Tensor) -> float:
    if not a.isfinite().all():
        return float("inf")
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def wide(x: Any) -> Any:
    """The same in float64."""
    match x:
        case Tensor():
            return x.double()
        case dict():
            return {name: wide(one) for name, one in x.items()}
        case tuple():
            return tuple(wide(one) for one in x)
    return x


def check_rule(name: str, rule: Rule, tokens: int, dtype: torch.dtype, fused: bool, ragged: bool, early: bool) -> bool:
    rows = 3
    torch.manual_seed(tokens)
    constants, extra = parameters(rule)
    raw = projected(rule, rows, tokens, dtype)
    inputs = raw if fused else prepared(rule, raw, extra)
    state = torch.randn(rows, *rule.state_shape, device=DEVICE)
    counts = torch.tensor([tokens, 0, (tokens + 1) // 2], device=DEVICE) if ragged else None
    valid = None if counts is None else torch.arange(tokens, device=DEVICE) < counts[:, None]

    def reference(state: Tensor, inputs: Inputs, constants: Inputs, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
        ready = prepared(rule, inputs, extra) if fused else inputs
        out, new = rule.scan(state, ready, constants, valid)
        return finish(rule, out, inputs[rule.value], extra) if fused else out, new

    truth, final = reference(*wide((state, inputs, constants, extra)))
    plain, plain_state = reference(state, inputs, constants, extra)
    new = state.clone()
    table = table_of(new, counts)
    if early and CUDA:
        torch.cuda.synchronize()  # the launch just before may not be the one that wrote the state
    if fused:
        out = STEPS[type(rule)](inputs, constants, table, **extra, early=early)
    else:
        out = recur_step(rule, inputs, constants, table, early=early)
    same = counts is None or torch.equal(new[1].view(torch.int32), state[1].view(torch.int32))
    finite = bool(out.isfinite().all())
    if valid is not None:
        out, plain, truth = out[valid], plain[valid], truth[valid]
    errors = distance(out, truth), distance(plain, truth), distance(new, final), distance(plain_state, final)
    ok = same and finite and errors[0] <= TIMES * errors[1] + 1e-6 and errors[2] <= TIMES * errors[3] + 1e-6
    told = f"T={tokens:<2} {str(dtype)[6:]:8} {'fused' if fused else 'plain'}{' ragged' * ragged}{' early' * early}"
    say(ok, f"{name} {told}", f"out {errors[0]:.1e} (plain {errors[1]:.1e}), state {errors[2]:.1e} ({errors[3]:.1e})")
    return ok


def check_convolution(name: str, channels: int, taps: int, tokens: int, dtype: torch.dtype) -> bool:
    rows, slots = 3, taps + 1
    torch.manual_seed(tokens)
    history = torch.randn(rows, 9, channels, device=DEVICE).to(dtype)
    lengths = torch.tensor([9, 0, 2], device=DEVICE)
    counts = torch.tensor([tokens, tokens, tokens // 2], device=DEVICE)
    ring = torch.full((rows, slots, channels), torch.nan, device=DEVICE, dtype=dtype)
    past = torch.zeros(rows, taps - 1, channels, device=DEVICE, dtype=dtype)
    for row, length in enumerate(lengths.tolist()):
        for position in range(max(0, length - taps + 1), length):
            ring[row, position % slots] = past[row, position - length] = history[row, position]
    x = torch.randn(rows, tokens, channels + 32, device=DEVICE).to(dtype)[..., 16:-16]
    weight, bias = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((channels, taps), (channels,)))
    before = ring.clone()
    out = convolve_step(x, weight, bias, table_of(ring, counts, lengths), act="silu")
    truth = F.silu(causal_convolution_by_steps(*wide((past, x, weight, bias))))
    plain = F.silu(causal_convolution_by_steps(past, x, weight, bias))
    kept = True
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for t in range(count):
            before[row, (length + t) % slots] = x[row, t]
        kept &= torch.equal(ring[row].nan_to_num(), before[row].nan_to_num())
    valid = torch.arange(tokens, device=DEVICE) < counts[:, None]
    errors = distance(out[valid], truth[valid]), distance(plain[valid], truth[valid])
    ok = kept and bool(out.isfinite().all()) and errors[0] <= TIMES * errors[1] + 1e-6
    say(ok, f"conv {name} T={tokens:<2} {str(dtype)[6:]}", f"out {errors[0]:.1e} (plain {errors[1]:.1e}), ring {kept}")
    return ok


def say(ok: bool, what: str, numbers: str) -> None:
    print(f"{'OK    ' if ok else 'FAILED'} {what:52} {numbers}", flush=True)


def tried(check: Callable[..., bool], *arguments: Any) -> bool:
    """A check that breaks is one that failed; the others go on."""
    try:
        return check(*arguments)
    except Exception as error:
        lines = str(error).strip().splitlines()
        say(False, f"{check.__name__} {arguments}", f"{type(error).__name__}: {lines[-1] if lines else ''}")
        return False


def checks() -> Iterable[tuple[Any, ...]]:
    for name, rule in (RULES if CUDA else SMALL).items():
        for dtype in (torch.bfloat16, torch.float32):
            yield check_rule, name, rule, 1, dtype, False, False, False
            yield check_rule, name, rule, 1, dtype, True, True, True
        yield check_rule, name, rule, 4, torch.bfloat16, False, True, False
        yield check_rule, name, rule, 16, torch.float32, False, True, False
        yield check_rule, name, rule, 3, torch.bfloat16, True, True, False
    for name, (channels, taps) in CONVOLUTIONS.items() if CUDA else [("small", (40, 4))]:
        for tokens, dtype in ((1, torch.bfloat16), (1, torch.float32), (4, torch.bfloat16), (16, torch.bfloat16)):
            yield check_convolution, name, channels, taps, tokens, dtype


# -- fast? -----------------------------------------------------------------------------------------------------------


def microseconds(launches: list[Callable[[], Any]]) -> float:
    """Of one launch, the median of several replays of a graph of them all."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return sorted(times[2:])[3]


def copy_speed() -> float:
    """Bytes a second of a plain copy, read and written."""
    source = torch.empty(2**29, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / (microseconds([lambda: target.copy_(source)] * 4) * 1e-6)


class Layers:
    """The layers of one model: states of their own, more in all than the device's cache; inputs shared, as if fresh."""

    def __init__(self, rule: Rule, rows: int, tokens: int = 1) -> None:
        self.rule, self.step = rule, STEPS[type(rule)]
        numbers = rows * torch.Size(rule.state_shape).numel()
        count = min(256, max(4, -(-(3 * 2**26) // (4 * numbers))))
        self.states = [torch.randn(rows, *rule.state_shape, device=DEVICE) for _ in range(count)]
        self.counts = torch.full((rows,), tokens, device=DEVICE)
        self.tables = [table_of(state, self.counts) for state in self.states]
        self.inputs = projected(rule, rows, tokens, torch.bfloat16)
        if isinstance(rule, GatedDelta):
            self.inputs["beta"] = self.inputs["beta"] - 4
        self.parameters = [parameters(rule) for _ in range(count)]
        constants = sum(x.numel() for x in self.parameters[0][0].values())
        small = sum(x.numel() for x in self.inputs.values()) + self.inputs[rule.value].numel()
        self.bytes = 8 * numbers + 4 * constants + 2 * small

    def launches(self, tile: Tile | None = None, early: bool = False) -> list[Callable[[], Any]]:
        def launch(i: int) -> Callable[[], Any]:
            constants, extra = self.parameters[i]
            return lambda: self.step(self.inputs, constants, self.tables[i], **extra, tile=tile, early=early)

        return [launch(i) for i in range(len(self.tables))]


def convolution_launches(
    channels: int, taps: int, rows: int, block: tuple[int, int] | None = None, early: bool = False, layers: int = 256
) -> list[Callable[[], Any]]:
    rings = [torch.randn(rows, taps, channels, device=DEVICE).bfloat16() for _ in range(layers)]
    lengths = torch.full((rows,), 9, device=DEVICE)
    counts = torch.ones_like(lengths)
    tables = [table_of(ring, counts, lengths) for ring in rings]
    x = torch.randn(rows, 1, channels, device=DEVICE).bfloat16()
    weights = [torch.randn(channels, taps, device=DEVICE).bfloat16() for _ in range(layers)]

    def launch(i: int) -> Callable[[], Any]:
        def one(*_: Any) -> Tensor:
            return convolve_step(x, weights[i], None, tables[i], act="silu", early=early, block=block)

        return partial(one, rings, lengths, counts)  # the tables hold only their addresses

    return [launch(i) for i in range(layers)]


def show(what: str, took: float, moved: int, copy: float) -> None:
    rate = moved / took * 1e6
    print(f"  {what:46} {took:8.2f} µs  {moved / 1e6:8.2f} MB  {rate / 1e12:5.2f} TB/s  {rate / copy:6.1%}", flush=True)


def compile_all() -> None:
    """Every variant that is timed, compiled side by side."""
    jobs: list[Callable[[], Any]] = []
    held = []
    for rule in RULES.values():
        for rows in (1, 32):
            layers = Layers(rule, rows)
            held.append(layers)
            jobs += [layers.launches(tile)[0] for tile in TILES[type(rule)]]
            jobs += [layers.launches(None, early)[0] for early in (False, True)]
    for channels, taps in CONVOLUTIONS.values():
        for block in BLOCKS:
            jobs.append(convolution_launches(channels, taps, 1, block, layers=1)[0])
    with ThreadPoolExecutor(16) as pool:
        for job in [pool.submit(job) for job in jobs]:
            if job.exception() is not None:
                print(f"FAILED to compile: {job.exception()}")
    torch.cuda.synchronize()


def times() -> None:
    copy = copy_speed()
    print(f"\ncopy: {copy / 1e12:.2f} TB/s\n")
    compile_all()
    for name, rule in RULES.items():
        for rows in (1, 8, 32):
            print(f"{name} {rule}, {rows} rows, 1 token, everything on the way")
            layers = Layers(rule, rows)
            for tile in TILES[type(rule)]:
                told = f"tile of {tile.numbers} numbers, {tile.warps} warps"
                show(told, microseconds(layers.launches(tile)), layers.bytes, copy)
            for early in (False, True):
                told = f"as configured{', early' * early}"
                show(told, microseconds(layers.launches(None, early)), layers.bytes, copy)
            del layers
        for tokens in (4, 16):
            layers = Layers(rule, 1, tokens)
            show(f"1 row, {tokens} tokens", microseconds(layers.launches()), layers.bytes, copy)
    for name, (channels, taps) in CONVOLUTIONS.items():
        for rows in (1, 32):
            print(f"convolution of {name}: {channels} channels, {taps} taps, {rows} rows")
            moved = 2 * channels * (taps + rows * (taps + 2))
            for block in BLOCKS:
                told = f"{block[0]} channels, {block[1]} warps"
                show(told, microseconds(convolution_launches(channels, taps, rows, block)), moved, copy)
            show("early", microseconds(convolution_launches(channels, taps, rows, None, True)), moved, copy)
    print("convolution, then rule, 1 row, as in a layer; the time is that of both")
    for name in ("mamba2-2.7b", "falcon-h1-7b", "qwen3-next"):
        layers = Layers(RULES[name], 1)
        channels, taps = CONVOLUTIONS[name]
        for early in (False, True):
            rules = layers.launches(None, early)
            convolutions = convolution_launches(channels, taps, 1, None, early, layers=len(rules))
            pairs = [launch for pair in zip(convolutions, rules, strict=True) for launch in pair]
            took = 2 * microseconds(pairs)
            show(f"{name}{', early' * early}", took, layers.bytes + 2 * channels * (2 * taps + 2), copy)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    with ThreadPoolExecutor(8 if CUDA else 1) as pool:  # compiling takes longer than running
        results = list(pool.map(lambda check: tried(*check), checks()))
    print(f"\n{sum(results)} of {len(results)} right, {time.perf_counter() - started:.0f} s")
    if CUDA:
        times()
        print(f"\n{time.perf_counter() - started:.0f} s in all")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
