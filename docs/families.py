"""Writes docs/families.md and the list of families in README.md: `python -m docs.families [--measure [FAMILY …]]`

What the layers of a family remember, and whether its decode steps are captured, is found on a small model of it, built
without weights. Errors against transformers are measured by `--measure`, and stored in docs/families.json; shares of
the decode limit are those of the runs in bench/results.
"""

from __future__ import annotations

import json
import math
import re
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lamina.checkpoint.gguf.file import ARCHITECTURES
from lamina.checkpoint.shapes import SHAPES
from lamina.config import Config
from lamina.loading import on_meta
from lamina.models import TEXT_PARTS, family_of, known_types
from lamina.planning.inspection import why_not_on_a_gpu
from lamina.planning.layer_kinds import kind_name
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FAMILIES as ENCODER_DECODERS

ROOT = Path(__file__).resolve().parent.parent
README, PAGE, MEASURED = ROOT / "README.md", ROOT / "docs" / "families.md", ROOT / "docs" / "families.json"
PLACE = re.compile(r"(<!-- families: python -m docs.families -->\n).*?(<!-- end -->)", re.S)
HEAD = """# Families
Written by `python -m docs.families`.

| column | meaning |
|---|---|
| error | largest difference of logits from transformers' (version in parentheses) in one pass over two rows of 40 \
tokens, relative to the largest logit; a small float32 checkpoint that transformers saved \
(`python -m docs.families --measure`). `tests/families` compares more: several configurations each, in \
pieces, ragged, padded |
| captured | decode steps on a GPU are one CUDA graph; otherwise the reason |
| share | of the decode limit, as `lamina bench` measured it on an H200 in bfloat16 with one row (`bench/results`) |

[adding-a-family.md](adding-a-family.md) shows how a family is written,
[transformers-findings.md](transformers-findings.md) where transformers itself is wrong.
"""


class Entry(NamedTuple):
    """What the table says of one model_type."""

    model_type: str
    name: str
    """The class."""
    file: str
    kinds: tuple[str, ...]
    captured: str
    """yes, or why decode steps are not captured"""

    @property
    def cells(self) -> tuple[str, str, str]:
        return f"`{self.model_type}`", f"[{self.name}](../{self.file})", "; ".join(self.kinds) or "nothing"


@cache
def case_of() -> dict[str, tuple[str, str]]:
    """model_type -> its first case in tests/families/cases, as (family, case)."""
    found: dict[str, tuple[str, str]] = {}
    for family, cases in (CASES | ENCODER_DECODERS).items():
        name = next(iter(cases))
        found.setdefault(cases[name]().to_dict()["model_type"], (family, name))
    return found


def config_of(model_type: str) -> dict[str, Any]:
    """A small configuration; that of transformers' defaults for families whose cases are elsewhere."""
    if model_type in TEXT_PARTS:
        return {"model_type": model_type, "text_config": config_of(TEXT_PARTS[model_type])}
    if model_type in case_of():
        family, name = case_of()[model_type]
        return (CASES | ENCODER_DECODERS)[family][name]().to_dict()
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type).to_dict()


@cache
def entries(captured: bool = True) -> list[Entry]:
    """captured=False: without tracing a step of each family, which is quicker"""
    found = []
    for model_type in known_types():
        config = config_of(model_type)
        cls = family_of(Config(config))
        model = on_meta(config, torch.bfloat16)
        kinds = dict.fromkeys(kind_name(spec) for entry in model.specs for spec in entry.values())
        file = cls.__module__.replace(".", "/") + ".py"
        reason = (why_not_on_a_gpu(model) or "yes").replace("|", "\\|") if captured else ""
        found.append(Entry(model_type, cls.__name__, file, tuple(kinds), reason))
    return found


def gguf_types() -> set[str]:
    """Families that are read from GGUF files too."""
    return {kind for name, one in ARCHITECTURES.items() for kind in one.model_types or (name,)}


def shares() -> dict[str, str]:
    """model_type -> share of the decode limit of one row, by the last run of each shape on an H200."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    for file in sorted((ROOT / "bench" / "results").glob("*h200*.md")):
        run = (run_of_json if file.with_suffix(".json").exists() else run_of_markdown)(file)
        if run is not None and run.contexts:
            nearest = min(run.contexts, key=lambda context: abs(context - 1024))
            found.setdefault(run.model_type, {})[run.shape] = nearest, run.contexts[nearest]
    return {
        kind: "; ".join(f"{share:.0%} ({name}, context {at:,})" for name, (at, share) in runs.items())
        for kind, runs in found.items()
    }


class DecodeRun(NamedTuple):
    """A run of `lamina bench` in bfloat16."""

    model_type: str
    shape: str
    contexts: dict[int, float]
    """context -> share of the limit, with one row"""


def run_of_json(file: Path) -> DecodeRun | None:
    run = json.loads(file.with_suffix(".json").read_text())
    if run["dtype"] != "bfloat16" or "model_type" not in run["shape"]["config"]:
        return None
    lines = [one for one in run.get("decode", ()) if one["subject"] == "lamina" and one["rows"] == 1]
    shares = {one["context"]: one["share"] for one in lines}
    return DecodeRun(run["shape"]["config"]["model_type"], run["shape"]["name"], shares)


def run_of_markdown(file: Path) -> DecodeRun | None:
    """The report of a run whose .json was not kept; None for a page that is none, or of a shape that is not known."""
    text = file.read_text()
    title = re.match(r"# (\S+) on ", text)
    if title is None or title[1] not in SHAPES or "--dtype bfloat16" not in text:
        return None
    shape = SHAPES[title[1]]
    columns: list[str] = []
    shares: dict[int, float] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        columns = cells if cells[:2] == ["rows", "context"] else columns
        if len(cells) == len(columns) and cells[0] == "1" and cells[2] == "lamina":
            shares[int(cells[1])] = float(cells[columns.index("share")].rstrip("%")) / 100
    return DecodeRun(shape.config["model_type"], shape.name, shares)


# -- measurements --------------------------------------------------------------------------------------------------


def measure(wanted: list[str]) -> None:
    """Compares the first case of each family, or of those wanted, with transformers; stores what is found."""
    found = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    cases = case_of() | {family: (family, "") for family in WITH_OWN_TESTS}
    for model_type, (family, name) in sorted(cases.items()):
        if wanted and family not in wanted and model_type not in wanted:
            continue
        if family in WITH_OWN_TESTS:
            error = round_up(WITH_OWN_TESTS[family]())
        else:
            error = round_up(error_with_encoder(family, name) if family in ENCODER_DECODERS else error_of(family, name))
        found[model_type] = {"error": error, "transformers": version("transformers")}
        print(f"{model_type}: {error:.0e}", flush=True)
        MEASURED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def error_of(family: str, name: str) -> float:
    from tests.families.harness import pair, random_ids, relative, truth

    theirs, ours = pair(family, name)
    pair.cache_clear()
    ids = random_ids(2, min(40, ours.context or 40), ours.vocab)
    return relative(ours(ids), truth(theirs, ids))  # type: ignore[arg-type]


def error_with_encoder(family: str, name: str) -> float:
    """The same with sources of 23 tokens."""
    from tests.families.harness import relative
    from tests.families.test_encoder_decoders import pair, random_row, truth

    theirs, ours = pair(family, name)
    pair.cache_clear()
    errors = []
    for seed in range(2):
        source, target = random_row(23, ours.source_vocab or ours.vocab, seed), random_row(40, ours.vocab, seed + 5)
        found = ours(target[None], source=ours.encode(source[None]))
        assert found is not None
        errors.append(relative(found[0], truth(theirs, source, target)))
    return max(errors)


def error_of_t5() -> float:
    from tests.families import test_t5 as t5
    from tests.families.harness import relative

    theirs, ours = t5.pair(t5.FIRST)
    source, target = t5.random_rows([23, 40])
    found = ours(target[None], source=ours.encode(source[None]))
    assert found is not None
    return relative(found[0], t5.truth(theirs, source, target))


def error_of_whisper() -> float:
    from tests.families import test_whisper as whisper
    from tests.families.harness import relative

    theirs, ours = whisper.pair(whisper.FIRST)
    source, target = whisper.random_features(theirs, [2 * whisper.POSITIONS])[0], whisper.random_rows([40])[0]
    found = ours(target[None], source=ours.encode(features=source[None]))
    assert found is not None
    return relative(found[0], whisper.truth(theirs, source, target))


WITH_OWN_TESTS = {"t5": error_of_t5, "whisper": error_of_whisper}


def round_up(error: float) -> float:
    """To 1, 2 or 5 times a power of ten, so that another machine finds the same.

    >>> round_up(3.1e-7), round_up(1e-6)
    (5e-07, 1e-06)
    """
    power = 10.0 ** math.floor(math.log10(max(error, 1e-8)))
    return float(f"{next(n for n in (1, 2, 5, 10) if error <= n * power * 1.0001) * power:.0e}")


# -- pages ---------------------------------------------------------------------------------------------------------


def table() -> str:
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    share, gguf = shares(), gguf_types()
    columns = ("`model_type`", "family", "layers remember", "formats", "error", "captured", "share")
    lines = [columns, ("---",) * len(columns)]
    for one in entries():
        own = TEXT_PARTS.get(one.model_type, one.model_type)
        error = measured.get(one.model_type)
        told = "" if error is None else f"≤ {error['error']:.0e} ({error['transformers']})"
        if own != one.model_type:
            told = f"as `{own}`"
        lines.append(
            (
                *one.cells, "safetensors, GGUF" if own in gguf else "safetensors", told, one.captured,
                share.get(one.model_type, ""),
            )
        )  # fmt: skip
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """The text of docs/families.md."""
    return f"{HEAD}\n{table()}"


GROUPS = {
    "Text models of multimodal releases": lambda one: one.model_type in TEXT_PARTS,
    "Encoder–decoder": lambda one: "cross-attention" in one.kinds,
    "Recurrent and hybrid": lambda one: any(kind.startswith(("recurrence", "convolution")) for kind in one.kinds),
    "Attention": lambda one: True,
}


def listing() -> str:
    """The families in a few lines, for the README."""
    grouped: dict[str, list[str]] = {group: [] for group in reversed(GROUPS)}
    for one in entries(captured=False):
        group = next(group for group, holds in GROUPS.items() if holds(one))
        grouped[group].append(f"`{one.model_type}`")
    return "\n".join(f"- {group}: {', '.join(names)}" for group, names in grouped.items() if names) + "\n"


def readme() -> str:
    """The README with the list as it should be."""
    return PLACE.sub(lambda found: found[1] + listing() + found[2], README.read_text())


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure([word for word in sys.argv[1:] if word != "--measure"])
    PAGE.write_text(page())
    README.write_text(readme())
