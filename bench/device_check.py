"""Everything that only a GPU can show, for every family: `python -m bench.device_check OUT.md [--jobs 16]`

Each family is checked by `bench/captured_checks.py`: captured decoding against plain passes, logits against
transformers, the laws, caches in pages and codes, many callers. Families whose captured steps launch the same kernels
(`bench/kernel_signature.py`) share a run: one of them gets every check, the others logits, greedy decoding in float32
and bfloat16, and passes of several tokens.

    --jobs N        N processes side by side
    --shard K/N     only every N-th family, from the K-th on
    --families A B  only these, with every check
    --again         forget what OUT.md's record holds

Results are appended to OUT.md.jsonl family by family, and a family that is in there is not run again, so a run that was
cut goes on where it ended. OUT.md is written from the record. A model of one's own (`docs/own_model.py`) is the family
"own". Families that the installed transformers does not have are named and skipped.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Hashable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from bench.captured_checks import Family

CASES_FOLDER = Path(__file__).resolve().parent.parent / "tests" / "families"


class NotInTransformers(Exception):
    """A family that the installed version does not have."""


class MissingConfig:
    """Stands for a configuration class that the installed transformers lacks, so that test cases can be imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **settings: Any) -> NoReturn:
        raise NotInTransformers(self.name)


def stand_in_for_missing_configs() -> list[str]:
    """Puts a `MissingConfig` into transformers for each name that the test cases import and it does not have."""
    import transformers

    missing = []
    for file in [*(CASES_FOLDER / "cases").glob("*.py"), *CASES_FOLDER.glob("*_cases.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                missing += [one.name for one in node.names if not hasattr(transformers, one.name)]
    for name in missing:
        setattr(transformers, name, MissingConfig(name))
    return missing


# -- what to run ---------------------------------------------------------------------------------------------------


def runs(families: list[str]) -> dict[str, tuple[str | None, Hashable]]:
    """family -> the family whose run it shares (None: it gets every check), and its signature; full runs first."""
    from bench.kernel_signature import signature
    from tests.families.cases import CASES, CORE
    from tests.families.encoder_decoder_cases import FAMILIES

    found: dict[str, tuple[str | None, Hashable]] = {}
    first: dict[Hashable, str] = {}
    for family in [*CORE, *(one for one in CASES if one not in CORE)]:
        try:
            kernels = signature(next(iter(CASES[family].values()))().to_dict())
        except Exception:  # told when it is run
            kernels = None
        shared = first.setdefault(kernels, family) if kernels is not None and not families else family
        found[family] = (None if shared == family else shared, kernels)
    found |= dict.fromkeys(["t5", *FAMILIES, "own"], (None, None))
    ordered = sorted(found, key=lambda family: found[family][0] is not None)
    return {family: found[family] for family in ordered if not families or family in families}


def model_of(family: str) -> Family:
    from bench.captured_checks import Family, WithEncoder
    from tests.families.cases import CASES
    from tests.families.encoder_decoder_cases import FAMILIES

    if family == "t5":
        return WithEncoder.t5()
    if family in FAMILIES:
        return WithEncoder.of(family, next(iter(FAMILIES[family])))
    return Family.of(family, next(iter(CASES[family])))


def run(family: str, shared: str | None) -> dict[str, Any]:
    """All checks of one family: a line of the record."""
    from bench.captured_checks import SHORT, WITH_ENCODER, columns, own_model

    line: dict[str, Any] = {"family": family, "shares": shared, "cells": {}, "failed": []}
    started = time.perf_counter()
    try:
        if family == "own":
            checks = {title: found for title, found in own_model().items()}
            line["cells"] = {title: said for title, (_, said) in checks.items()}
            line["failed"] = [title for title, (good, _) in checks.items() if not good]
        else:
            one = model_of(family)
            wanted = WITH_ENCODER if one.encodes else SHORT if shared else tuple(columns())
            for title, check in columns().items():
                if title in wanted:
                    good, said = check(one)
                    line["cells"][title] = said
                    line["failed"] += [] if good else [title]
                    print(f"{family}, {title}: {said}{'' if good else ' FAILED'}", flush=True)
    except NotInTransformers as missing:
        line["skipped"] = f"transformers has no {missing}"
    except Exception as error:
        traceback.print_exc()
        line["failed"].append(f"{type(error).__name__}: {error}"[:300])
    line["seconds"] = round(time.perf_counter() - started, 1)
    return line


# -- the record ----------------------------------------------------------------------------------------------------


def read(record: Path) -> dict[str, dict[str, Any]]:
    """family -> its last line. A line that was cut by the end of a process is left out."""
    found = {}
    for text in record.read_text().splitlines() if record.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["family"]] = line
    return found


def append(record: Path, line: dict[str, Any]) -> None:
    """In one write, so that lines of several processes do not mix; on a new line, whatever a killed process left."""
    with open(record, "ab", buffering=0) as file:
        file.write(f"\n{json.dumps(line)}\n".encode())


def page(lines: dict[str, dict[str, Any]], machine: str) -> str:
    """The record as Markdown."""
    from bench.captured_checks import GREEDY, columns

    titles = list(columns())
    rows = [["family", *titles, "seconds"], ["---"] * (len(titles) + 2)]
    notes = []
    for family, line in sorted(lines.items()):
        if family == "own":
            notes += [f"A model of one's own, {title}: {said}" for title, said in line["cells"].items()]
        elif "skipped" in line:
            notes.append(f"{family} was skipped: {line['skipped']}")
        else:
            other = f"as {line['shares']}" if line["shares"] else "–"
            rows.append([family, *(line["cells"].get(title, other) for title in titles), f"{line['seconds']:.0f}"])
            if (said := line["cells"].get(GREEDY, "")).startswith("plain passes"):
                notes.append(f"{family} is not captured: {said}")
        notes += [f"FAILED: {family}, {title}" for title in line["failed"]]
    table = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
    return f"{machine} Command: `python -m bench.device_check`.\n\n{table}\n" + "".join(f"- {note}\n" for note in notes)


def machine() -> str:
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"Machine: {name}, PyTorch {torch.__version__}, transformers {version('transformers')}, Python "
        f"{platform.python_version()}, {date.today()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--families", nargs="*", default=[])
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    record = given.out.with_name(given.out.name + ".jsonl")
    stand_in_for_missing_configs()  # before test cases are imported
    if given.again:
        record.unlink(missing_ok=True)
    if given.jobs > 1:
        start_jobs(given)
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        which, of = map(int, given.shard.split("/"))
        for family, (shared, _) in list(runs(given.families).items())[which - 1 :: of]:
            if family not in read(record):
                append(record, run(family, shared))
    lines = read(record)
    given.out.write_text(page(lines, machine()))
    failed = [family for family, line in lines.items() if line["failed"]]
    print(f"{len(lines)} families, {len(failed)} failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


def start_jobs(given: argparse.Namespace) -> None:
    """Runs the shards side by side and waits for them; each has one CPU thread."""
    words = [sys.executable, "-m", "bench.device_check", str(given.out)]
    more = ["--families", *given.families] if given.families else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    shards = [[*words, "--shard", f"{k}/{given.jobs}", *more] for k in range(1, given.jobs + 1)]
    for job in [subprocess.Popen(shard, env=environment) for shard in shards]:
        job.wait()


if __name__ == "__main__":
    main()
