"""The recurrent kernels on a GPU: right, and how near to the memory's speed: `python -m bench.kernels.recurrent`

First every kernel beside its reference on shapes of real models, in bfloat16 and float32. Then times: one CUDA graph of
many layers, each with a state of its own, more than the device's cache holds in all. Mixers are timed between their
projections (`mixer.py`, and convolution, rule and norm apart) and with them. The share is that of plain reading,
measured in the same run. Without a GPU (TRITON_INTERPRET=1): small shapes, no times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import all_at_once, microseconds, read_speed
from lamina import kernels
from lamina.bench.random_model import start
from lamina.cache.memory import Memory
from lamina.cache.spec import Recurrent
from lamina.checkpoint.shapes import SHAPES
from lamina.config import Config
from lamina.kernels.columns import entry_row
from lamina.kernels.recurrent.conv import convolve_step
from lamina.kernels.recurrent.mixer import mix_step
from lamina.kernels.recurrent.recur import recur_step
from lamina.kernels.recurrent.state import Tile
from lamina.models.falcon_h1 import mamba as falcon_mixer
from lamina.models.mamba2 import Mamba2
from lamina.nn import GatedDeltaMixer, GatedRMSNorm, Mamba2Mixer
from lamina.recurrence import (
    RGLRU,
    SSD,
    WKV,
    ChannelDelta,
    GatedDelta,
    Rule,
    SelectiveScan,
    causal_convolution_by_steps,
)
from lamina.recurrence.rg_lru import Gates
from lamina.runtime.gpu.backend import KERNELS, KernelBackend, TableEntry

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TIMES = 2 if CUDA else 4  # the error of the plain computation; the interpreter cuts off what the device rounds
BF16, F32 = torch.bfloat16, torch.float32
ROWS = (1, 8, 32)
FEWER, MORE = [Tile(1024, 4), Tile(2048, 4), Tile(2048, 8)], [Tile(4096, 4), Tile(4096, 8), Tile(8192, 8)]
TILES: dict[tuple[type[Rule], bool], list[Tile]] = {  # (rule, several rows)
    (SSD, False): [Tile(512, 4), *FEWER],
    (SSD, True): [*FEWER, *MORE],
    (GatedDelta, False): [Tile(1024, 1), Tile(1024, 2), *FEWER, Tile(4096, 4)],
    (GatedDelta, True): [Tile(1024, 1), *FEWER, *MORE],
}
ALONE: dict[str, Rule] = {
    "mamba2-2.7b": SSD(heads=80, head_dim=64, state=128, groups=1),
    "qwen3-next": GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    "mamba-2.8b": SelectiveScan(channels=5120, state=16),
    "kimi-linear": ChannelDelta(heads=32, key_dim=128, value_dim=128),
    "recurrentgemma-9b": RGLRU(channels=4096),
    "rwkv-4-7b": WKV(channels=4096),
}
SMALL: dict[str, Rule] = {
    "ssd": SSD(heads=2, head_dim=8, state=16, groups=1),
    "delta": GatedDelta(key_heads=1, value_heads=2, key_dim=16, value_dim=8),
    "scan": SelectiveScan(channels=24, state=4),
    "channel delta": ChannelDelta(heads=2, key_dim=16, value_dim=8),
    "rg-lru": RGLRU(channels=64),
    "wkv": WKV(channels=24),
}
LRU_HEADS = 16  # blocks of channels of the gates of RG-LRU
CONVOLUTIONS = {"mamba-2.8b": (5120, 4), "lfm2": (2048, 3)}
Inputs = dict[str, Tensor]
Mixer = Mamba2Mixer | GatedDeltaMixer


# -- mixers ----------------------------------------------------------------------------------------------------------


def mixers() -> dict[str, Callable[[], Mixer]]:
    """By name, how a mixer of the model is built."""
    if not CUDA:
        return {
            "ssd": lambda: Mamba2Mixer(12, 4, 6, 16, 2, 4, norm=GatedRMSNorm(24, 1e-5, groups=2)),
            "ssd, one norm": lambda: Mamba2Mixer(12, 4, 6, 16, 2, 4, norm=GatedRMSNorm(24, 1e-5)),
            "ssd, only gated": lambda: Mamba2Mixer(12, 2, 8, 16, 1, 3),
            "delta": lambda: GatedDeltaMixer(12, 1, 2, 16, 8, 4, eps=1e-5),
        }
    configs = {name: Config(SHAPES[name].config) for name in ("mamba2-2.7b", "falcon-h1-7b", "qwen3-next")}
    c = configs["qwen3-next"]
    return {
        "mamba2-2.7b": lambda: Mamba2.mixer(configs["mamba2-2.7b"]),
        "falcon-h1-7b": lambda: falcon_mixer(configs["falcon-h1-7b"]),
        "qwen3-next": lambda: GatedDeltaMixer(
            c.hidden_size, c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim,
            c.linear_value_head_dim, c.linear_conv_kernel_dim, eps=c.rms_norm_eps,
        ),
    }  # fmt: skip


class Apart(KernelBackend):
    """A kernel for each part of a mixer."""

    def mix(self, *args: Any, **how: Any) -> None:
        return None


class Layer:
    """A mixer with random weights and what its rows remember; stands where a captured step's memory stands."""

    apart = False  # whether each part has a kernel of its own

    def __init__(self, build: Callable[[], Mixer], rows: int, dtype: torch.dtype) -> None:
        with torch.device(DEVICE):
            self.mixer = build().requires_grad_(False)
        noise = torch.Generator(DEVICE).manual_seed(rows)
        for module in self.mixer.modules():
            for name, values in module.named_parameters(recurse=False):
                kept = name in getattr(module, "keep_float32", ())
                values.data = values.data.to(F32 if kept else dtype)
                start(module, name, values.data, noise)
        self.rule, self.taps = self.mixer.rule, self.mixer.conv.weight.shape[1]
        self.ring = torch.randn(rows, self.taps + 1, self.mixer.conv.weight.shape[0], device=DEVICE).to(dtype)
        self.state = torch.randn(rows, *self.rule.state_shape, device=DEVICE)
        self.lengths = torch.tensor([9, 0, 2] * 11, device=DEVICE)[:rows].contiguous()
        self.counts = torch.ones(rows, dtype=torch.int64, device=DEVICE)
        self.tables = table_of(self.ring, self.counts, self.lengths), table_of(self.state, self.counts)
        entries = {
            "conv": TableEntry(self.mixer.conv.spec, self.tables[0]),
            "state": TableEntry(Recurrent(self.rule), self.tables[1]),
        }
        passes = [SimpleNamespace(backend=backend) for backend in (KERNELS, Apart())]
        self.memories = [Memory(one, 0, entries) for one in passes]  # type: ignore[arg-type]
        self.bytes = 8 * self.state.numel()
        self.asked: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def mix(self, *what: Any, around: Mapping[str, Any], tile: Tile | None = None, **how: Any) -> Tensor:
        self.asked = what, {"around": around, **how}
        if tile:
            out = mix_step(*what, *self.tables, **how, **around, tile=tile)
        else:
            out = self.memories[self.apart].mix(*what, around=around, **how)
        return out if kernels.on() or isinstance(out, Tensor) else out.divided()

    def prepare(self) -> None:
        """Runs the mixer once, so that `again` can repeat what it asks of its memory."""
        width = self.mixer.project.in_features
        self.u = torch.randn(len(self.counts), 1, width, device=DEVICE).to(self.ring.dtype)
        self.whole()

    def whole(self) -> Tensor:
        """The mixer with its projections."""
        return self.mixer(self.u, self)  # type: ignore[arg-type]

    def again(self, tile: Tile | None = None) -> Any:
        assert self.asked is not None
        return self.mix(*self.asked[0], **self.asked[1], tile=tile)


def cut(rule: Rule, mixed: Tensor, given: Inputs) -> Inputs:
    """The inputs of the rule that a convolution's channels are."""
    shapes = {name: shape for name, shape in rule.input_shapes.items() if name not in given}
    parts = mixed.split([prod(shape) for shape in shapes.values()], dim=-1)
    return {name: part.unflatten(-1, shapes[name]) for name, part in zip(shapes, parts, strict=True)}


def table_of(store: Tensor, counts: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    pointers = {"k": store, "lengths": lengths, "counts": counts}
    row = {name: 0 if one is None else one.data_ptr() for name, one in pointers.items()}
    return torch.tensor(entry_row(row | {"slots": store.shape[1], "ring": store.shape[1]}), device=store.device)


# -- right? ----------------------------------------------------------------------------------------------------------


def check_mix(name: str, build: Callable[[], Mixer], dtype: torch.dtype, tile: Tile | None, rows: int = 3) -> bool:
    """Rows, the second without a token, against the plain operations in float64 and in their own dtype."""
    torch.manual_seed(1)
    layer = Layer(build, rows, dtype)
    layer.prepare()
    layer.counts[1:2] = 0
    live = layer.counts > 0
    ring, state = layer.ring.clone(), layer.state.clone()
    assert layer.asked is not None
    (rule, x, inputs, constants), how = layer.asked

    def plain(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        conv, norm, gate = how["conv"], how["norm"], as_(how["gate"], dtype)
        past = torch.zeros(rows, layer.taps - 1, ring.shape[2], device=DEVICE).to(ring)
        for row, length in enumerate(layer.lengths.tolist()):
            for back in range(1, min(length, layer.taps - 1) + 1):
                past[row, -back] = ring[row, (length - back) % ring.shape[1]]
        mixed = causal_convolution_by_steps(*as_((past, x, conv.weight, conv.bias), dtype))
        mixed = mixed if conv.act is None else F.silu(mixed)
        around = as_(dict(how["around"]), dtype)
        if norm is None:
            around["gate"] = gate.unflatten(-1, rule.input_shapes[rule.value])
        ready = rule.before({**cut(rule, mixed, inputs), **as_(inputs, dtype)}, **around)
        out, new = rule.scan(as_(state, dtype), ready, as_(constants, dtype), live[:, None])
        y = rule.after(out, ready, **around).flatten(2)
        if norm is not None:
            y = norm(*(part.unflatten(-1, (-1, len(norm.weight))) for part in (y, gate))).flatten(2)
        return y, new

    (truth, final), (rough, rough_state) = plain(torch.float64), plain(None)
    settle()
    out = layer.again(tile)
    for row, length in enumerate(layer.lengths.tolist()):
        if live[row]:
            ring[row, length % ring.shape[1]] = x[row, 0]
    kept = torch.equal(layer.ring, ring) and torch.equal(layer.state[1:2], state[1:2]) and not out[1:2].any()
    errors = distance(out[live], truth[live]), distance(rough[live], truth[live])
    states = distance(layer.state, final), distance(rough_state, final)
    ok = kept and errors[0] <= TIMES * errors[1] + 1e-6 and states[0] <= TIMES * states[1] + 1e-6
    told = f"mix {name} {rows} rows {str(dtype)[6:]:8} {f'{tile.values} values, {tile.warps} warps' if tile else ''}"
    say(ok, told, f"out {errors[0]:.1e} (plain {errors[1]:.1e}), state {states[0]:.1e} ({states[1]:.1e}), kept {kept}")
    return ok


def check_rule(name: str, rule: Rule, tokens: int, dtype: torch.dtype) -> bool:
    """Ragged rows, with everything on the way in and out."""
    torch.manual_seed(tokens)
    inputs, constants, around = alone(rule, 3, tokens, dtype)
    state = torch.randn(3, *rule.state_shape, device=DEVICE)
    if isinstance(rule, WKV):
        state[:, 1] = 1 + state[:, 1].abs()  # a denominator
    counts = torch.tensor([tokens, 0, (tokens + 1) // 2], device=DEVICE)
    valid = torch.arange(tokens, device=DEVICE) < counts[:, None]

    def plain(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        some = as_(around, dtype)
        ready = rule.before(as_(inputs, dtype), **some)
        out, new = rule.scan(as_(state, dtype), ready, as_(constants, dtype), valid)
        return rule.after(out, ready, **some), new

    (truth, final), (rough, rough_state) = plain(torch.float64), plain(None)
    new = state.clone()
    table = table_of(new, counts)
    settle()
    out = recur_step(rule, inputs, constants, table, **around)
    same = torch.equal(new[1].view(torch.int32), state[1].view(torch.int32))
    errors = distance(out[valid], truth[valid]), distance(rough[valid], truth[valid])
    states = distance(new, final), distance(rough_state, final)
    ok = same and errors[0] <= TIMES * errors[1] + 1e-6 and states[0] <= TIMES * states[1] + 1e-6
    say(
        ok,
        f"rule {name} T={tokens:<2} {str(dtype)[6:]}",
        f"out {errors[0]:.1e} (plain {errors[1]:.1e}), state {states[0]:.1e} ({states[1]:.1e})",
    )
    return ok


def alone(rule: Rule, rows: int, tokens: int, dtype: torch.dtype) -> tuple[Inputs, Inputs, dict[str, Any]]:
    """-> inputs as slices of one projection, constants, and what is done around the rule"""
    sizes = {name: prod(shape) for name, shape in rule.input_shapes.items()}
    parts = torch.randn(rows, tokens, sum(sizes.values()), device=DEVICE).to(dtype).split(list(sizes.values()), -1)
    inputs = {
        name: part.unflatten(-1, shape) if (shape := rule.input_shapes[name]) else part[..., 0]
        for name, part in zip(sizes, parts, strict=True)
    }
    gate = torch.randn(inputs[rule.value].shape, device=DEVICE).to(dtype)
    if isinstance(rule, RGLRU):
        channels, block = rule.channels, rule.channels // LRU_HEADS
        shapes = ((channels, block), (channels,)) * 2
        weights = (torch.randn(shape, device=DEVICE).to(dtype) / block**0.5 for shape in shapes)
        gates = Gates(*weights, rate=-torch.rand(channels, device=DEVICE))
        positions = torch.arange(tokens, device=DEVICE).repeat(rows, 1)
        around = {"gates": gates, "positions": positions, "gate": gate, "act": "gelu_pytorch_tanh"}
        return {"x": inputs["x"]}, {}, around
    if isinstance(rule, WKV):
        w, first = -torch.rand(rule.channels, device=DEVICE), torch.randn(rule.channels, device=DEVICE)
        return {"k": inputs["k"], "v": inputs["v"]}, {"w": w, "first": first}, {"gate": gate}
    delta = isinstance(rule, GatedDelta | ChannelDelta)
    heads = rule.input_shapes["g" if delta else "dt"][0]
    bias, some = torch.randn(heads, device=DEVICE) - 2, torch.randn(heads, device=DEVICE)
    if delta:
        bias = torch.randn(rule.input_shapes["g"], device=DEVICE) - 2
        return inputs, {}, {"gates": (-some.exp(), bias), "unit": True, "gate": gate}
    shape = rule.state_shape if isinstance(rule, SelectiveScan) else (heads,)
    return inputs, {"A": -torch.randn(shape, device=DEVICE).exp()}, {"skip": some, "dt_bias": bias, "gate": gate}


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
    table = table_of(ring, counts, lengths)
    settle()
    out = convolve_step(x, weight, bias, table, act="silu")
    truth = F.silu(causal_convolution_by_steps(*as_((past, x, weight, bias), torch.float64)))
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


def distance(a: Tensor, b: Tensor) -> float:
    if not a.isfinite().all():
        return float("inf")
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))


def as_(x: Any, dtype: torch.dtype | None) -> Any:
    """The same in another dtype, or as it is."""
    match x:
        case Tensor():
            return x if dtype is None or not x.is_floating_point() else x.to(dtype)
        case Gates():
            return Gates(*(as_(one, dtype) for one in x))
        case dict():
            return {name: as_(one, dtype) for name, one in x.items()}
        case tuple():
            return tuple(as_(one, dtype) for one in x)
    return x


def settle() -> None:
    """The launch just before a kernel may not be the one that wrote its state."""
    if CUDA:
        torch.cuda.synchronize()


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
    for name, build in mixers().items():
        for dtype in (BF16, F32):
            yield check_mix, name, build, dtype, None
            yield check_mix, name, build, dtype, None, 1
        yield check_mix, name, build, BF16, Tile(1024, 1)
        yield check_mix, name, build, BF16, Tile(8192, 8)
    for name, rule in (ALONE if CUDA else SMALL).items():
        for tokens, dtype in ((1, BF16), (1, F32), (3, BF16), (16, F32)):
            yield check_rule, name, rule, tokens, dtype
    for name, (channels, taps) in CONVOLUTIONS.items() if CUDA else [("small", (40, 4))]:
        for tokens, dtype in ((1, BF16), (1, F32), (4, BF16), (16, BF16)):
            yield check_convolution, name, channels, taps, tokens, dtype


# -- fast? -----------------------------------------------------------------------------------------------------------


def show(what: str, calls: list[Callable[[], Any]], moved: int, limit: float) -> None:
    try:
        took = microseconds(calls)
    except Exception as error:  # one that does not run must not hide the others
        print(f"  {what:46} FAILED {type(error).__name__}: {error}".splitlines()[0], flush=True)
        return
    rate = moved / took / 1e6
    print(f"  {what:46} {took:8.2f} µs  {moved / 1e6:8.2f} MB  {rate:5.2f} TB/s  {rate / limit:6.1%}", flush=True)


def layers_of(build: Callable[[], Mixer], rows: int, most: int = 64) -> list[Layer]:
    """Enough that neither states nor weights stay in the device's cache."""
    layers = [Layer(build, rows, BF16)]
    for _ in range(min(most, max(4, -(-(3 << 26) // layers[0].bytes))) - 1):
        layers.append(Layer(build, rows, BF16))
    for layer in layers:
        layer.prepare()
    return layers


def times() -> None:
    limit = read_speed()
    some = [layer for build in mixers().values() for rows in (1, 8) for layer in layers_of(build, rows, most=1)]
    all_at_once([partial(x.again, tile) for x in some for tile in TILES[type(x.rule), len(x.counts) > 1]])
    for name, build in mixers().items():
        for rows in ROWS:
            layers = layers_of(build, rows)
            rule, moved = layers[0].rule, layers[0].bytes
            print(f"{name} {rule}, {rows} rows, between its projections")
            for tile in TILES[type(rule), rows > 1]:
                calls: list[Callable[[], Any]] = [partial(layer.again, tile) for layer in layers]
                show(f"tile of {tile.values} values, {tile.warps} warps", calls, moved, limit)
            whole = moved + sum(x.nbytes for x in layers[0].mixer.parameters())
            for apart in (False, True):
                for layer in layers:
                    layer.apart = apart
                told = "a kernel for each part" if apart else "as configured"
                show(told, [layer.again for layer in layers], moved, limit)
                show(f"{told}, with projections", [layer.whole for layer in layers], whole, limit)
    print("rules alone, as configured")
    for name, rule in ALONE.items():
        for rows, tokens in ((1, 1), (32, 1), (1, 4), (1, 16)):
            inputs, constants, around = alone(rule, rows, tokens, BF16)
            numbers = rows * prod(rule.state_shape)
            count = min(512, -(-(3 << 26) // (4 * numbers)))  # a state of one vector stays in the device's cache
            states = [torch.zeros(rows, *rule.state_shape, device=DEVICE) for _ in range(count)]
            tables = [table_of(state) for state in states]
            calls = [partial(recur_step, rule, inputs, constants, table, **around) for table in tables]
            show(f"{name}, {rows} rows, {tokens} tokens", calls, 8 * numbers, limit)
    print("convolutions alone, as configured")
    for name, (channels, taps) in CONVOLUTIONS.items():
        for rows in (1, 32):
            rings = [torch.randn(rows, taps, channels, device=DEVICE).to(BF16) for _ in range(64)]
            lengths = torch.full((rows,), 9, device=DEVICE)
            x, weight = (
                torch.randn(*shape, device=DEVICE).to(BF16) for shape in ((rows, 1, channels), (channels, taps))
            )
            tables = [table_of(ring, None, lengths) for ring in rings]
            calls = [partial(convolve_step, x, weight, None, table, act="silu") for table in tables]
            show(f"{name}, {rows} rows", calls, 2 * channels * (taps + rows * (taps + 2)), limit)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    started = time.perf_counter()
    with ThreadPoolExecutor(8 if CUDA else 1) as pool:  # compiling takes longer than running
        results = list(pool.map(lambda check: tried(*check), checks()))
    print(f"\n{sum(results)} of {len(results)} right, {time.perf_counter() - started:.0f} s")
    if CUDA:
        with kernels.in_use():
            times()
        print(f"\n{time.perf_counter() - started:.0f} s in all")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
