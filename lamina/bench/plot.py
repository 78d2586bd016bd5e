"""The picture of a run: the share of the limit over the context, a line for each number of rows and subject."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

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
