"""The configurations in which kernels are launched, as lines of text: `python -m tests.kernels.configurations 90`

A line is a model, a kernel with its grid and the numbers that were chosen for it, and the uses it is launched in. What
`h200.txt` says was measured to be fast on an H200; the lines of another card show what is different there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are not run, whatever they are for

import torch
from triton.runtime.interpreter import InterpretedFunction

from lamina.checkpoint.shapes import SHAPES
from lamina.kernels.limits import CARDS, Limits, assumed

CHOSEN = (
    "BLOCK", "ROWS", "COLS", "N_BLOCK", "M", "R", "B", "STAGES", "SPLITS", "HELD", "UNROLL", "GROUP_BLOCK", "TOGETHER",
    "TOKENS", "EARLY", "BUNCH", "CHUNK", "TREE", "MERGES", "QUERIES", "VALUES", "PARTS", "AHEAD", "LIVE_ONLY", "GROUP",
    "wanted", "least", "num_warps", "num_stages",
)  # fmt: skip
FIXED = {  # that have nothing to choose
    "_positions", "_embed", "_angles", "_commit_tokens", "_finish", "_rotate", "_encode", "_norm_kernel",
    "_gate_kernel", "_sum_pairs",
}  # fmt: skip
USES: list[dict[str, Any]] = [
    dict(rows=1), dict(rows=8), dict(rows=32), dict(rows=1, tokens=4), dict(rows=8, tokens=8),
    dict(rows=1, codec="int8"), dict(rows=8, codec="int4"), dict(rows=32, codec="fp8"), dict(rows=8, page=64),
]  # fmt: skip


def launched(config: Mapping[str, Any], limits: Limits, **how: Any) -> Iterator[str]:
    """What a step of a model, without its weights, launches on a device with these limits."""
    from lamina.loading import on_meta
    from lamina.runtime.prebuild import build_kernels

    lines: dict[str, None] = {}

    def note(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | named
        given = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        chosen = " ".join(f"{name.removeprefix('num_')}={given[name]}" for name in CHOSEN if name in given)
        if self.__name__ not in FIXED:
            lines[f"{self.__name__} {'x'.join(map(str, grid))} {chosen}"] = None

    with patch.object(InterpretedFunction, "run", note), assumed(limits):
        build_kernels(on_meta(config, torch.bfloat16), **how)
    yield from lines


def configurations(limits: Limits, name: str) -> list[str]:
    """The lines of a model of `lamina.checkpoint.shapes`."""
    config = dict(SHAPES[name].config, num_hidden_layers=4)
    uses: dict[str, list[str]] = {}
    for how in USES:
        if "codec" not in how or config["model_type"] != "mamba2":  # which has nothing that a codec writes
            for line in launched(config, limits, **how):
                uses.setdefault(line, []).append(",".join(f"{key}={value}" for key, value in how.items()))
    return sorted(f"{name}: {line}: {' '.join(some)}" for line, some in uses.items())


if __name__ == "__main__":
    for shape in SHAPES:
        print("\n".join(configurations(CARDS[int(sys.argv[1])], shape)))
