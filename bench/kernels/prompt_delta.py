"""Recurrences over prompts on a GPU, by kernels and by PyTorch: `python -m bench.kernels.prompt_delta [tiles]`

The gated delta rule of Qwen3-Next (one layer: 16 key heads, 32 value heads of 128) and the selective scan of
Mamba-1 2.8b (one layer: 5,120 channels, 16 states). Each line is a prompt, a way, its milliseconds for one layer, its
GiB beside inputs and outputs, and the errors of outputs and state against a computation in float64, as shares of the
largest value. With "tiles", the kernels also with other tiles than their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.kernels.prefill import milliseconds
from bench.kernels.timing import all_at_once
from lamina.kernels.limits import limits_of
from lamina.kernels.recurrent.prompt.gated_delta import Walk, gated_delta_prompt, walk_for
from lamina.kernels.recurrent.prompt.selective_scan import Tile, selective_scan_prompt, tile_for
from lamina.recurrence import GatedDelta, Rule, SelectiveScan

BF16, F32 = torch.bfloat16, torch.float32
DELTA = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
SCAN = SelectiveScan(channels=5120, state=16)
PROMPTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "8,192": ((8192,), BF16),
    "512": ((512,), BF16),
    "64 rows of 100 to 1,024": (tuple(100 + 924 * i // 63 for i in range(64)), BF16),
    "512, float32": ((512,), F32),
}
WALKS = [Walk(32, 4, 3), Walk(32, 4, 2), Walk(32, 4, 1), Walk(32, 8, 3), Walk(64, 4, 2), Walk(64, 8, 2), Walk(16, 4, 2)]
TILES = [Tile(128, 1, 8), Tile(128, 1, 12), Tile(128, 1, 16), Tile(256, 2, 8), Tile(256, 1, 8), Tile(512, 4, 8)]
Way = Callable[[], tuple[Tensor, Tensor]]


class Case:
    """Inputs in the model's dtype, with decays and step sizes in float32, as models have them."""

    def __init__(self, rule: Rule, lengths: tuple[int, ...], dtype: torch.dtype = BF16) -> None:
        torch.manual_seed(0)
        rows, tokens = len(lengths), max(lengths)
        inputs = {n: torch.randn(rows, tokens, *shape, device="cuda") for n, shape in rule.input_shapes.items()}
        self.constants: dict[str, Tensor] = {}
        if isinstance(rule, GatedDelta):
            inputs["q"] = F.normalize(inputs["q"], dim=-1) * rule.key_dim**-0.5
            inputs["k"] = F.normalize(inputs["k"], dim=-1)
            inputs["g"] = -F.softplus(2 * inputs["g"] - 3)
            inputs["beta"] = inputs["beta"].sigmoid()
        else:
            inputs["dt"] = F.softplus(inputs["dt"] - 4)
            self.constants["A"] = -torch.arange(1.0, SCAN.state + 1, device="cuda").repeat(SCAN.channels, 1)
        self.rule, self.lengths, self.itemsize = rule, lengths, dtype.itemsize
        self.inputs = {n: x if n in rule.exact else x.to(dtype) for n, x in inputs.items()}
        self.state = torch.randn(rows, *rule.state_shape, device="cuda")
        self.counts = torch.tensor(lengths, device="cuda") if rows > 1 else None
        self.valid = None if self.counts is None else torch.arange(tokens, device="cuda") < self.counts[:, None]

    def truth(self) -> tuple[Tensor, Tensor]:
        """The last row and its first heads or channels, in float64."""
        last = {n: x[-1:, : self.lengths[-1]].double() for n, x in self.inputs.items()}
        if isinstance(self.rule, GatedDelta):
            rule: Rule = GatedDelta(1, 2, self.rule.key_dim, self.rule.value_dim)
            last = {n: x[:, :, : rule.input_shapes[n][0]] for n, x in last.items()}
            return rule.chunk(self.state[-1:, :2].double(), last, {})
        few, rule = 64, SelectiveScan(64, SCAN.state)
        last = {n: x[..., :few] if n in ("x", "dt") else x for n, x in last.items()}
        return rule.chunk(self.state[-1:, :few].double(), last, {"A": self.constants["A"][:few].double()})

    def errors(self, found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> tuple[float, float]:
        out, state = (x[-1:].double() for x in found)
        heads = truth[1].shape[1]
        out, state = out[:, : self.lengths[-1], :heads], state[:, :heads]
        a, b = (float((x - y).abs().max() / y.abs().max()) for x, y in zip((out, state), truth, strict=True))
        return a, b

    def ways(self, tiles: bool) -> Iterator[tuple[str, Way]]:
        rule, limits, rows = self.rule, limits_of(self.state.device), len(self.lengths)
        given = (self.state, self.inputs, self.constants, self.counts)
        if isinstance(rule, GatedDelta):
            delta = rule
            chosen = walk_for(rows * 32, 128, 128, self.itemsize, limits)
            yield f"kernels, {chosen}", lambda: gated_delta_prompt(delta, *given)
            for walk in WALKS if tiles else []:
                yield f"kernels, {walk}", lambda walk=walk: gated_delta_prompt(delta, *given, walk=walk)  # type: ignore[misc]
        elif isinstance(rule, SelectiveScan):
            scan = rule
            own = tile_for(rows * 5120 * 16, self.itemsize, limits)
            yield f"kernel, {own}", lambda: selective_scan_prompt(scan, *given)
            for tile in TILES if tiles else []:
                yield f"kernel, {tile}", lambda tile=tile: selective_scan_prompt(scan, *given, tile=tile)  # type: ignore[misc]
        yield "PyTorch", lambda: rule.chunk(self.state, self.inputs, self.constants, self.valid)


def main(tiles: bool) -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, bfloat16 unless said\n")
    print("| rule | prompt | way | ms | GiB | error of outputs | of the state |\n|---|---|---|---|---|---|---|")
    for rule in (DELTA, SCAN):
        for name, (lengths, dtype) in PROMPTS.items():
            case = Case(rule, lengths, dtype)
            found = list(case.ways(tiles))
            all_at_once([way for _, way in found[:-1]])
            truth = case.truth()
            for way_name, way in found:
                line = f"| {type(rule).__name__} | {name} | {way_name} |"
                try:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    errors = case.errors(way(), truth)
                    more = (torch.cuda.max_memory_allocated() - before) / 2**30
                    print(
                        f"{line} {milliseconds(way):.3f} | {more:.2f} | {errors[0]:.1e} | {errors[1]:.1e} |", flush=True
                    )
                except Exception as failure:  # a tile that does not fit must not hide the others
                    print(f"{line} {type(failure).__name__}: {str(failure)[:120]} | | | |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["tiles"])
