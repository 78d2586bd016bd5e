"""Runs lamina.verify on transformers' families, writes findings: `python -m docs.transformers_findings [FAMILY …|all]`

Without a name the pages are written anew from docs/transformers_findings.json; with names (or `all`) those families are
run first, and the file is brought up to date. Models are small and random, see docs/tiny_models.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from docs.tiny_models import build, families
from lamina.checking import Report
from lamina.checking.transformers import verify_transformers
from lamina.checking.transformers.caches import KINDS
from lamina.checking.transformers.paths import PATHS
from lamina.errors import InputError

DOCS = Path(__file__).resolve().parent
PAGE, FOUND = DOCS / "transformers-findings.md", DOCS / "transformers_findings.json"
PLACE = re.compile(r"(<!-- findings: python -m docs.transformers_findings -->\n).*?(<!-- end -->)", re.S)
BASICS = ("determinism", "causality")
BETWEEN = "continued ragged"
"""The path with padding between turns, on which windows and states differ: those families are listed, not tabled."""


def run(family: str, config: Any, caches: Sequence[str] = KINDS) -> dict[str, Any]:
    """What verify finds in a small model of a family, or why there is none."""
    try:
        model = build(config())
    except InputError as error:
        return {"skipped": str(error)}
    except Exception as error:
        return {"skipped": f"its configuration cannot be shrunk: {short(error)}"}
    try:
        report = verify_transformers(model, laws=[*PATHS], caches=caches, progress=False)
    except Exception as error:
        return {"skipped": f"its uncached pass raises {short(error)}"}
    return found(report) | {"class": type(model).__name__, "transformers": version("transformers")}


def found(report: Report) -> dict[str, Any]:
    return {
        "tokens": report.tokens,
        "tried": [law for law in report.laws if report.cases.get(law)],
        "differences": [
            {
                "path": one.law,
                "cache": one.way,
                "where": one.where,
                "kinds": sorted(one.kinds),
                "row": one.row,
                "position": one.position,
                "logits": round_up(one.logits if one.logits is not None else one.error),
                "raised": None if one.raised is None else short(one.raised),
            }
            for one in report.differences
        ],
    }


def short(error: Exception) -> str:
    """The type of an error and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'…' if len(text) > 120 else ''}"


def round_up(error: float) -> float | None:
    """Two figures are enough, and other machines find the same; None for infinity, which JSON does not know."""
    return float(f"{error:.0e}") if error < 1e30 else None


# -- the page ------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """A line for each family, path and place: caches that differ at the same place are one line."""
    lines = ["| family | path | cache | first differing | logits |", "|---|---|---|---|---|"]
    for family, result in sorted(results.items()):
        for law in [*BASICS, *(path for path in PATHS if path != BETWEEN)]:
            grouped: dict[str, list[dict[str, Any]]] = {}
            for one in result["differences"]:
                if one["path"] == law:
                    grouped.setdefault(place(one), []).append(one)
            for where, found in grouped.items():
                caches = ", ".join(dict.fromkeys(cache_name(one["cache"]) for one in found))
                error = "" if found[0]["raised"] else f"{max(one['logits'] for one in found):.0e}"
                lines.append(f"| `{family}` | {law} | {caches} | {where} | {error} |")
    return "\n".join(lines) + "\n"


def listed(families: Iterable[str]) -> str:
    names = sorted(families)
    return f"{len(names)} families differ: {', '.join(f'`{name}`' for name in names)}"


def place(one: dict[str, Any]) -> str:
    kinds = f" ({', '.join(one['kinds'])})" if one["kinds"] and not one["kinds"][0][0].isupper() else ""
    where = f"{one['where']}{kinds}"
    if one["raised"]:
        return f"{where} raises {one['raised'].partition(':')[0]}"
    return f"{where}, row {one['row']}, position {one['position']}"


def cache_name(way: str) -> str:
    return {"its cache": "dynamic", "its static cache": "static"}.get(way, way)


def page() -> str:
    """The page as it should be."""
    return PLACE.sub(lambda found: found[1] + findings(json.loads(FOUND.read_text())) + found[2], PAGE.read_text())


def findings(results: dict[str, Any]) -> str:
    """The generated part of the page."""
    run = {family: result for family, result in results.items() if "skipped" not in result}
    paths = {family: {one["path"] for one in result["differences"]} for family, result in run.items()}
    differing = [family for family in run if paths[family] - {BETWEEN}]
    tokens = sum(result["tokens"] for result in run.values())
    versions = sorted({result["transformers"] for result in run.values()})
    skipped = "".join(
        f"| `{family}` | {result['skipped'].replace('|', '/')} |\n"
        for family, result in sorted(results.items())
        if "skipped" in result
    )
    return (
        f"{len(run)} families of transformers {', '.join(versions)}, {tokens:,} tokens compared. "
        f"{len(differing)} differ on some path besides that with padding between turns:\n\n{table(run)}\n"
        f"- With padding between turns (continued ragged) {listed(f for f in run if BETWEEN in paths[f])}.\n"
        f"- On no path that exists for them {listed(f for f in run if not paths[f])}.\n\n"
        f"Not run:\n\n| family | why |\n|---|---|\n{skipped}"
    )


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    wanted = sys.argv[1:]
    known = families() if wanted else {}
    for family in known if wanted == ["all"] else wanted:
        results[family] = run(family, known[family])
        told = results[family].get("skipped") or f"{len(results[family]['differences'])} differences"
        print(f"{family}: {told}", flush=True)
        FOUND.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page())
