"""The picture of a run: the share of the limit over the context, a line for each number of rows and subject; of prompts
the share of the limit of compute, a bar for each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from lamina.bench.measure import DeviceRates
from lamina.bench.prefill import Prefilled
from lamina.bench.runner import Results

COLOURS = ("#3366cc", "#dc6912", "#109a5b", "#8a4fbf", "#777777")  # one for each number of rows
STYLES = {"lamina": "-o", "transformers": ":s", "transformers, compiled": "--^"}


def draw(shape: str, machine: str, results: Results, path: Path) -> bool:
    """Writes a PNG; False where there is nothing to draw or no matplotlib to draw it with."""
    if not results.decoded or find_spec("matplotlib") is None:
        return False
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    rows = sorted({one.rows for one in results.decoded})
    for i, count in enumerate(rows):
        for subject in dict.fromkeys(one.subject for one in results.decoded):
            line = sorted(
                (one.context, 100 * results.share(one))
                for one in results.decoded
                if one.rows == count and one.subject == subject
            )
            if line:
                label = f"{subject}, {count} row{'s' * (count != 1)}"
                axes.plot(
                    *zip(*line, strict=True), STYLES.get(subject, "-.x"), color=COLOURS[i % len(COLOURS)], label=label
                )
    contexts = sorted({one.context for one in results.decoded})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in contexts])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.axhline(100, color="black", linewidth=0.8)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("share of the memory limit (%)")
    axes.set_title(f"Decoding {shape}\n{machine}, read {results.limits.read / 1e9:,.0f} GB/s", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(path, dpi=140)
    return True


def draw_prefill(machine: str, found: Sequence[tuple[str, Prefilled]], rates: DeviceRates, path: Path) -> bool:
    """The same for prompts: (shape, measurement) pairs."""
    if not found or find_spec("matplotlib") is None:
        return False
    lines = list(dict.fromkeys((shape, one.prompts) for shape, one in found))
    subjects = list(dict.fromkeys(one.subject for _, one in found))
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 1.6 + 0.45 * len(lines)), layout="constrained")
    axes, height = figure.subplots(), 0.8 / len(subjects)
    for i, subject in enumerate(subjects):
        shares = [
            (lines.index((shape, one.prompts)) + i * height, 100 * one.of_compute(rates), one.seconds)
            for shape, one in found
            if one.subject == subject
        ]
        axes.barh([y for y, *_ in shares], [x for _, x, _ in shares], height, label=subject, color=COLOURS[i])
        for y, x, seconds in shares:
            axes.text(x + 0.5, y, f"{seconds * 1e3:,.4g} ms", va="center", fontsize=7)
    axes.set_yticks(
        [y + 0.4 - height / 2 for y in range(len(lines))], [f"{name}, {one}" for name, one in lines], fontsize=8
    )
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("share of the limit of compute (%)")
    axes.set_title(f"Prefill\n{machine}, {rates.matrix / 1e12:,.4g} TFLOP/s", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=140)
    return True
