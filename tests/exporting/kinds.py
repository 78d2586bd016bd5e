"""Every kind of memory as a small model, exported for a target and compared with eager passes token for token.

`compare(name, target, path)` raises where they differ. every_kind.py runs it as tests, and docs/export_table.py writes
the table of docs/export.md.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lamina
from lamina import Model, Program
from lamina.attention.window import Chunked, Sliding
from lamina.cache.codec.codec import Codecs
from lamina.exporting.aotinductor import compile_to
from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, SelectiveScan
from tests.exporting.commands import printed
from tests.exporting.stack import CHUNK, Listener, Mix, RecurOther, Translator, run_both
from tests.laws.toys import (
    WIDTH,
    Attend,
    AttendCross,
    AttendLatent,
    AttendSelected,
    AttendShared,
    Convolve,
    Highest,
    Index,
    Recur,
    Toy,
    random_ids,
)

CAPACITY, LENGTH = 44, 24  # windows and rings have at most 8 slots, so a row goes three times past each
EXACT = {"pt2": torch.float64, "aotinductor": torch.float64, "onnx": torch.float32, "executorch": torch.float32}
FAST = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp.simdlen": 1}  # compiles faster; the programs are small


@dataclass(frozen=True)
class Kind:
    """What is exported: the blocks of a model, and how its cache is kept."""

    blocks: Callable[[], Sequence[nn.Module]]
    rows: int = 2
    slack: int = 0
    codec: Codecs | None = None
    source: int | None = None
    bounded: bool = True
    features: bool = False


def codec(name: Codecs) -> Kind:
    """Lines and rings, with groups of 32 values, which are rotated, and smaller ones, and latents, which are not."""
    return Kind(lambda: [Attend(None, 40, 32), AttendLatent(6, Sliding(4))], codec=name)


class ChannelRecur(Recur):
    """Kimi's delta rule, with keys and queries of length 1."""

    def inputs(self, x: Tensor) -> dict[str, Tensor]:
        found = super().inputs(x)
        return {name: nn.functional.normalize(y, dim=-1) if name in "qk" else y for name, y in found.items()}

    def constants(self) -> dict[str, Tensor]:
        return {}


SCAN, DUAL = SelectiveScan(channels=4, state=3), SSD(heads=2, head_dim=3, state=2, groups=1)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=3, value_dim=2)
CHANNEL = ChannelDelta(heads=2, key_dim=3, value_dim=2)

KINDS: dict[str, Kind] = {
    "full": Kind(lambda: [Attend()]),
    "full, one row": Kind(lambda: [Attend()], rows=1),  # a clock of one element must not be folded into compiled code
    "full, five rows": Kind(lambda: [Attend()], rows=5),
    "full, all slots read": Kind(lambda: [Attend()], bounded=False),
    "sliding": Kind(lambda: [Attend(Sliding(4))]),
    "sliding, first tokens kept": Kind(lambda: [Attend(Sliding(4, keep=2))]),
    "sliding, with slack": Kind(lambda: [Attend(Sliding(4))], slack=3),
    "chunked": Kind(lambda: [Attend(Chunked(4))]),
    "latent": Kind(lambda: [AttendLatent(6)]),
    "latent, sliding": Kind(lambda: [AttendLatent(6, Sliding(4))]),
    "indexer and shared selection": Kind(lambda: [AttendSelected(3), AttendSelected(source=0)]),
    "shared keys and values": Kind(lambda: [Attend(Sliding(4)), AttendShared(0)]),
    "token vectors": Kind(lambda: [Index(), Index(Sliding(4))]),
    "cross-attention": Kind(lambda: [AttendCross()], source=9),
    "cross-attention, int8": Kind(lambda: [AttendCross()], source=9, codec="int8"),
    "cross-attention, features": Kind(lambda: [AttendCross()], source=9, features=True),
    "convolution": Kind(lambda: [Convolve(4)]),
    "selective scan": Kind(lambda: [Recur(SCAN)]),
    "SSD": Kind(lambda: [Recur(DUAL)]),
    "gated delta": Kind(lambda: [Recur(DELTA)]),
    "channel delta": Kind(lambda: [ChannelRecur(CHANNEL)]),
    "RG-LRU": Kind(lambda: [RecurOther(RGLRU(channels=4))]),
    "WKV": Kind(lambda: [RecurOther(WKV(channels=4))]),
    "states, with slack": Kind(lambda: [Recur(SCAN), Convolve(3), Recur(DELTA)], slack=3),
    "states, one row, with slack": Kind(lambda: [Recur(DUAL), Attend(Sliding(4))], rows=1, slack=2),
    "experts": Kind(lambda: [Attend(), Mix()]),
    "codec int8": codec("int8"),
    "codec int4": codec("int4"),
    "codec k6v5": codec("k6v5"),
    "codec fp8": codec("fp8"),
    "a kind from outside the package": Kind(lambda: [Highest()]),
}
OUTSIDE = "a kind from outside the package"
REFUSED: dict[tuple[str, str], str] = {
    ("onnx", OUTSIDE): "ONNX has no aten.cummax, which prefill needs: use another target",
    ("executorch", OUTSIDE): "ExecuTorch has no kernel for aten::cummax.out, which .* needs: use another target",
}
"""(target, kind) -> what the error says, where a target cannot do a kind."""


@functools.cache
def model_of(name: str, dtype: torch.dtype) -> Toy:
    kind = KINDS[name]
    if kind.source is not None:
        return (Listener if kind.features else Translator)(*kind.blocks()).to(dtype)
    return Toy(*kind.blocks(), dtype=dtype)


def compare(name: str, target: str, path: Path) -> Program:
    """Exports this kind to `path`, runs the file and eager passes alike, and raises where logits or tokens differ:
    ragged rows, three times past every window, rewound as far as possible, one row restarted, then all."""
    kind, dtype = KINDS[name], EXACT[target]
    model = model_of(name, dtype)
    sizes: dict[str, Any] = dict(slack=kind.slack, codec=kind.codec, capacity=CAPACITY)
    write(model, kind.rows, path, target, **sizes, chunk=CHUNK, source=kind.source, bounded=kind.bounded)
    program = Program.load(path)
    assert program.manifest.target == target
    cache = model.new_cache(kind.rows, **sizes)
    # In float32 a sum in another order may round one code of thousands to the next level, which moves logits by 1e-3.
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4 if kind.codec is None else 5e-3
    attach = functools.partial(attach_sources, model, cache, program, kind)
    attach(range(kind.rows), seed=0)
    run_both(model, cache, program, LENGTH, seed=0, tolerance=tolerance)
    assert program.rewindable == cache.rewindable.tolist()
    back = [min(n, row + 1 + kind.slack) for row, n in enumerate(program.rewindable)]
    program.rewind(back)
    cache.rewind(back)
    run_both(model, cache, program, 5, seed=1, tolerance=tolerance)
    program.reset([0])
    cache.reset([0])
    attach([0], seed=1)
    run_both(model, cache, program, 7, seed=2, tolerance=tolerance)
    program.reset()
    cache.reset()
    attach(range(kind.rows), seed=2)
    run_both(model, cache, program, 9, seed=3, tolerance=tolerance)
    return program


def write(model: Model, rows: int, path: Path, target: str, **options: Any) -> None:
    """Exports to a file or folder; for aotinductor with options that compile faster."""
    if target == "aotinductor":
        compile_to(lamina.export(model, rows, **options), path, **FAST)
    else:
        lamina.export(model, rows, to=path, target=target, **options)


def attach_sources(
    model: Toy, cache: lamina.Cache, program: Program, kind: Kind, rows: Sequence[int], seed: int
) -> None:
    """Gives these rows random sources of different lengths, if the kind has sources."""
    if kind.source is None:
        return
    if kind.features:
        features, counts = random_features(kind, seed, rows)
        features = features.to(model.dtype)
        for row in rows:
            source = model.encode(features=features[row : row + 1, :, : counts[row]])  # type: ignore[attr-defined]
            cache.attach(source, rows=[row])
        program.encode(features, counts)
        return
    given: list[list[int]] = [[] for _ in range(kind.rows)]
    for row in rows:
        given[row] = random_ids(1, kind.source - 4 * (row % 2), seed=seed)[0].tolist()
        cache.attach(model.encode([given[row]]), rows=[row])  # type: ignore[attr-defined]
    program.encode(given)


def random_features(kind: Kind, seed: int, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Features [B, WIDTH, frames] for each row, and how many each row has: 0 for other rows than `rows`."""
    assert kind.source is not None
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(kind.rows, WIDTH, 2 * kind.source - seed, generator=draw, dtype=torch.float64)
    return found, [found.shape[-1] - 5 * row if row in rows else 0 for row in range(kind.rows)]


def file_name(target: str) -> str:
    """What the archive is called: a .pte file for executorch."""
    return "model.pte" if target == "executorch" else "model"


def compare_in_cpp(name: str, folder: Path, decode: Path) -> None:
    """Runs the compiled programs of `compare(name, "aotinductor", folder)` with the C++ program `decode`, and raises
    where it prints other tokens than eager passes give."""
    kind = KINDS[name]
    rows = range(kind.rows)

    def lists(length: int, seed: int) -> str:
        """Random ids for each row, the longer the row's number the fewer."""
        ids = [random_ids(1, max(1, length - 3 * row), seed + row)[0].tolist() for row in rows]
        return " ".join(",".join(map(str, row)) for row in ids)

    start = [] if kind.source is None else [f"encode {lists(kind.source, 10)}"]
    if kind.features:
        features, counts = random_features(kind, 0, rows)
        (folder / "features.bin").write_bytes(features.numpy().tobytes())
        start = [f"features {folder / 'features.bin'} {' '.join(map(str, counts))}"]
    commands = [*start, f"feed {lists(9, 0)}", f"decode {LENGTH}"]
    if kind.slack:
        commands += [f"rewind {' '.join('1' for _ in rows)}", f"feed {lists(3, 1)}", "decode 4"]
    commands += ["reset", *start, f"feed {lists(8, 2)}", "decode 3"]
    done = subprocess.run([decode, folder], input="\n".join(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = model_of(name, EXACT["aotinductor"])
    cache = model.new_cache(kind.rows, capacity=CAPACITY, slack=kind.slack, codec=kind.codec)
    assert [[int(i) for i in line.split()] for line in done.stdout.splitlines()] == printed(model, cache, commands)
