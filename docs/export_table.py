"""Exports small models and writes the tables of docs/export.md: kinds of memory, and families, by target.

    python -m docs.export_table                              both tables anew from the recorded results
    python -m docs.export_table FAMILY … | all               runs families first, and records what they give
    python -m docs.export_table --kinds [KIND … | all]       runs kinds of memory
    … --target onnx                                          for another target than pt2
    … --missing                                              skips what has been recorded

A run exports a random model, loads the file and compares it with eager passes: prompts of different lengths, and three
times as many tokens as the largest ring has slots. Kinds are compared by tests/exporting/kinds.py, which also rewinds
and restarts them. Results are recorded in export_families.json and export_kinds.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lamina
from docs.tiny_models import build
from lamina import Model, Program, Source
from lamina.exporting.build_decode import build as build_decode
from lamina.exporting.export import TARGETS
from tests.exporting.kinds import KINDS, compare, compare_in_cpp, file_name, write
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FIRST_CASES
from tests.families.harness import loaded

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "export.md"
FOUND = {"families": DOCS / "export_families.json", "kinds": DOCS / "export_kinds.json"}
PLACE = "(<!-- {}: python -m docs.export_table -->\n).*?(<!-- end -->)"
FAMILIES: dict[str, Callable[[], Any]] = {name: next(iter(of.values())) for name, of in CASES.items()} | FIRST_CASES
PROMPTS, CAPACITY, SOURCE = [[5, 9, 7, 3, 8, 6, 4, 11, 12, 13, 14], [10, 3, 17]], 96, 24
SAME = "same tokens"

Feed = Callable[[list[list[int]]], list[int]]
"""Appends ids to each row -> the most likely next id of each."""


def run_family(family: str, target: str) -> str:
    """SAME, or why the family is not exported, or where its tokens differ."""
    torch.manual_seed(0)
    try:
        model = loaded(build(FAMILIES[family]()))
        capacity = min(CAPACITY, model.max_positions or CAPACITY)
        source = min(SOURCE, model.max_source_positions or SOURCE) if model.start_ids else None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file_name(target)
            write(model, 2, path, target, capacity=capacity, chunk=8, source=source)
            program = Program.load(path)
        cache = model.new_cache(2, capacity=capacity)
        prompts, rings = PROMPTS, [slots for slots, _ in program.manifest.rings]
        if program.manifest.source is not None:
            prompts = [list(model.start_ids)] * 2
            attach(model, cache, program)
        count = min(3 * max(rings, default=8), capacity - max(map(len, prompts)))

        def feed(rows: list[list[int]]) -> list[int]:
            ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
            logits = model(ids, cache=cache, counts=[len(row) for row in rows], logits="last")
            assert logits is not None
            return logits.argmax(-1).tolist()

        found = greedy(lambda rows: program.feed(rows).tolist(), prompts, count)
        expected = greedy(feed, prompts, count)
    except Exception as error:
        return failure(error)
    if found == expected:
        return SAME
    first = min(i for a, b in zip(found, expected, strict=True) for i in range(count) if a[i] != b[i])
    return f"other tokens from token {first} of {count} on"


def failure(error: Exception) -> str:
    """An error as a cell of the table: in full if it is one of Lamina's, which say what can be done instead."""
    text = " ".join(str(error).split())
    return f"refused: {text}" if isinstance(error, lamina.LaminaError) else f"{type(error).__name__}: {text[:100]}"


def attach(model: Model, cache: lamina.Cache, program: Program) -> None:
    """Gives each row a source: the prompts, or random features of two lengths."""
    made = program.manifest.source
    assert made is not None
    if made["kind"] == "ids":
        program.encode(PROMPTS)
        sources: list[Source] = [model.encode([ids]) for ids in PROMPTS]  # type: ignore[operator]
    else:
        given = torch.randn(2, *made["shape"], made["most"])
        counts = [made["most"], made["most"] * 2 // 3]
        program.encode(given, counts)
        name = "features" if made["shape"] else "waves"
        sources = [
            model.encode(None, [n], **{name: row[None, ..., :n]})  # type: ignore[operator]
            for row, n in zip(given, counts, strict=True)
        ]
    for row, source in enumerate(sources):
        cache.attach(source, rows=[row])


def greedy(feed: Feed, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens of each row after these prompts, past any that would end the row."""
    following, made = feed(prompts), []
    for _ in range(count):
        made.append(following)
        following = feed([[token] for token in following])
    return [list(row) for row in zip(*made, strict=True)]


def run_kind(kind: str, target: str) -> str:
    """SAME, or why the kind is not exported, or where its logits or tokens differ."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file_name(target)
            compare(kind, target, path)
            if target == "aotinductor":
                compare_in_cpp(kind, path, build_decode(Path(folder) / "decode", "-O0"))
    except Exception as error:
        return failure(error)
    return SAME


def table(what: str, found: dict[str, dict[str, str]]) -> str:
    """One line for each family or kind that was run."""
    lines = [f"| {what} | " + " | ".join(TARGETS) + " |", "|---" * (len(TARGETS) + 1) + "|"]
    order = list(KINDS) if what == "kind of memory" else sorted(found)
    for name in order:
        cells = [found.get(name, {}).get(target, "not run").replace("|", "/") for target in TARGETS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/export.md with the recorded results."""
    text = PAGE.read_text()
    for name, what in (("families", "family"), ("kinds", "kind of memory")):
        lines = table(what, recorded(name))
        place = re.compile(PLACE.format(name), re.S)
        assert place.search(text), f"{PAGE} has no place for the table of {name}"
        text = place.sub(lambda match, lines=lines: match[1] + lines + match[2], text)  # type: ignore[misc]
    return text


def recorded(name: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FOUND[name].read_text()) if FOUND[name].exists() else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.export_table", description="Tables of docs/export.md.")
    parser.add_argument("names", nargs="*", help="families or kinds to run, or all")
    parser.add_argument("--kinds", action="store_true", help="kinds of memory, not families")
    parser.add_argument("--target", choices=TARGETS, default="pt2")
    parser.add_argument("--missing", action="store_true", help="only what has not been recorded for this target")
    given = parser.parse_args()
    what, every, run = ("kinds", KINDS, run_kind) if given.kinds else ("families", FAMILIES, run_family)
    names = [name for word in given.names for name in (every if word == "all" else [word])]
    if unknown := set(names) - every.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))} among the {what}: {'; '.join(every)}")
    for name in names:
        if given.missing and given.target in recorded(what).get(name, {}):
            continue
        gc.collect()
        gc.disable()  # tracing makes millions of objects: looking for garbage among them takes a fifth of the time
        result = run(name, given.target)
        found = recorded(what)  # another run may have added to it
        found.setdefault(name, {})[given.target] = result
        print(f"{given.target}, {name}: {result}", flush=True)
        FOUND[what].write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page())
        torch.compiler.reset()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
