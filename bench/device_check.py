"""Everything that only a GPU can show, for every family: `python -m bench.device_check OUT.md [--jobs 16]`

Each family is checked by `bench/captured_checks.py`: captured decoding against plain passes, logits against
transformers, the laws, caches in pages and codes, many callers. Families whose captured steps launch the same kernels
(`bench/kernel_signature.py`) share a run: one of them gets every check, the others logits, greedy decoding in float32
and bfloat16, and passes of several tokens.

    --jobs N        N processes side by side, each of which takes the next family when it is done with one
    --seconds S     after this, no family is begun
    --first A B     these before all others
    --families A B  only these, with every check
    --only prompts  (repeat it) only checks whose title has one of these words, in a record of their own
    --shard K/N     only every N-th family, from the K-th on
    --again         also families that OUT.md's record holds; the last line of each counts

Results are appended to OUT.md.jsonl family by family, and a family that is in there is not run again, so a run that was
cut goes on where it ended. OUT.md is written from the record. A model of one's own (`docs/own_model.py`) is the family
"own". Families that the installed transformers does not have are named and skipped.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable
from datetime import date
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from bench.captured_checks import Found
    from bench.device_models import Family

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


def model_types() -> list[str]:
    """Every family of the package, those with all kinds of layers first, and two that no model_type names."""
    from bench.device_models import OTHER_NAMES, WITH_STATES
    from lamina.models import TEXT_PARTS
    from tests.families.cases import CASES, CORE
    from tests.families.encoder_decoder_cases import FIRST_CASES

    names = {case: model_type for model_type, case in OTHER_NAMES.items()}
    decoders = [names.get(case, case) for case in dict.fromkeys([*CORE, *CASES])]
    return [*decoders, *FIRST_CASES, WITH_STATES, *TEXT_PARTS, "own"]


def runs(families: list[str], first: list[str] | None = None) -> dict[str, tuple[str | None, Hashable]]:
    """family -> the family whose run it shares (None: it gets every check), and its signature; `first` and full runs
    first."""
    from lamina.models import TEXT_PARTS

    found: dict[str, tuple[str | None, Hashable]] = {}
    by_kernels: dict[Hashable, str] = {}
    for family in model_types():
        kernels = kernels_of(TEXT_PARTS.get(family, family))
        shared = by_kernels.setdefault(kernels, family) if kernels is not None and not families else family
        found[family] = (None if shared == family else shared, kernels)
    if unknown := {*families, *(first or ())} - {*found}:
        raise SystemExit(f"no family is called {', '.join(sorted(unknown))}; known: {', '.join(sorted(found))}")
    ordered = sorted(found, key=lambda family: (family not in (first or ()), found[family][0] is not None))
    return {family: found[family] for family in ordered if not families or family in families}


@functools.cache
def kernels_of(family: str) -> Hashable:
    """The signature of its captured step; None if there is none, which is told when the family is run."""
    from bench.device_models import config_of
    from bench.kernel_signature import signature

    try:
        return signature(config_of(family))
    except Exception:
        return None


def run(family: str, shared: str | None, only: list[str] | None = None) -> dict[str, Any]:
    """The checks of one family: a line of the record. only: those whose title has one of these words."""
    from bench.captured_checks import SHORT, WITH_SOURCE, columns, own_model
    from bench.device_models import model_of

    line: dict[str, Any] = {"family": family, "shares": shared, "cells": {}, "failed": [], "took": {}}
    line["machine"] = machine()
    started = time.perf_counter()
    try:
        if family == "own":
            checks = own_model()
            line["cells"] = {title: said for title, (_, said) in checks.items()}
            line["failed"] = [title for title, (good, _) in checks.items() if not good]
        else:
            one = model_of(family)
            wanted = [title for title in titles(only) if not one.encodes or title in WITH_SOURCE]
            for title in wanted if shared is None else [title for title in wanted if title in SHORT]:
                try_one(line, title, columns()[title], one)
    except NotInTransformers as missing:
        line["skipped"] = f"transformers has no {missing}"
    except Exception as error:
        traceback.print_exc()
        line["failed"].append(f"{type(error).__name__}: {error}"[:300])
    line["seconds"] = round(time.perf_counter() - started, 1)
    return line


def titles(only: list[str] | None) -> list[str]:
    """The titles of all checks, or of those that have one of the words `only`."""
    from bench.captured_checks import columns

    found = [title for title in columns() if not only or any(word in title for word in only)]
    if not found:
        raise SystemExit(f"no check has {' or '.join(only or ())} in its title: {'; '.join(columns())}")
    return found


def try_one(line: dict[str, Any], title: str, check: Callable[[Family], Found], one: Family) -> None:
    """Writes down what a check finds. One that raises has failed; the others are still tried."""
    begun = time.perf_counter()
    try:
        good, said = check(one)
    except Exception as error:
        traceback.print_exc()
        good, said = False, f"{type(error).__name__}: {error}"[:300]
    line["took"][title] = round(time.perf_counter() - begun, 1)
    line["cells"][title] = said
    line["failed"] += [] if good else [f"{title}: {said}"]
    print(f"{line['family']}, {title}: {said}{'' if good else ' FAILED'}", flush=True)


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


def page(lines: dict[str, dict[str, Any]], machine: str, only: list[str] | None = None) -> str:
    """The record as Markdown."""
    from bench.captured_checks import GREEDY

    checks = titles(only)
    rows = [["family", *checks, "seconds"], ["---"] * (len(checks) + 2)]
    notes = []
    for family, line in sorted(lines.items()):
        if family == "own":
            notes += [f"A model of one's own, {title}: {said}" for title, said in line["cells"].items()]
        elif "skipped" in line:
            notes.append(f"{family} was skipped: {line['skipped']}")
        else:
            other = f"as {line['shares']}" if line["shares"] else "–"
            rows.append([family, *(line["cells"].get(title, other) for title in checks), f"{line['seconds']:.0f}"])
            if (said := line["cells"].get(GREEDY, "")).startswith("plain passes"):
                notes.append(f"{family} is not captured: {said}")
        notes += [f"FAILED: {family}, {title}" for title in line["failed"]]
    table = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in rows)
    command = "python -m bench.device_check" + "".join(f" --only {word}" for word in only or ())
    return f"{machine} Command: `{command}`.\n\n{table}\n" + "".join(f"- {note}\n" for note in notes)


def machine() -> str:
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"Machine: {name}, PyTorch {torch.__version__}, transformers {version('transformers')}, Python "
        f"{platform.python_version()}, {date.today()}."
    )


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", nargs="*", default=[])
    parser.add_argument("--families", nargs="*", default=[])
    parser.add_argument("--only", action="append", metavar="WORD")
    parser.add_argument("--shard", default="1/1")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    record = given.out.with_name(given.out.name + ".jsonl")
    stand_in_for_missing_configs()  # before test cases are imported
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if given.worker:
        return work(record, given.only)
    which, of = map(int, given.shard.split("/"))
    done = {} if given.again else read(record)
    wanted = list(runs(given.families, given.first).items())[which - 1 :: of]
    tasks = ((family, shared) for family, (shared, _) in wanted if family not in done)
    until = started + given.seconds
    if given.jobs > 1:
        side_by_side(list(tasks), record, given.jobs, until, given.only)
    else:
        for family, shared in tasks:
            if time.perf_counter() < until:
                append(record, run(family, shared, given.only))
    lines = read(record)
    given.out.write_text(
        page(lines, next((line["machine"] for line in lines.values() if "machine" in line), machine()), given.only)
    )
    failed = [family for family, line in lines.items() if line["failed"]]
    left = [family for family, _ in wanted if family not in lines]
    print(f"{len(lines)} families, {len(failed)} failed: {', '.join(failed) or 'none'}; {len(left)} left")
    sys.exit(bool(failed or left))


# -- processes -----------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "bench.device_check"]
DONE, LAST = "this family is done", "this family is done, and this process ends"


def work(record: Path, only: list[str] | None) -> None:
    """What a process does: reads a family and the one it shares a run with from each line of standard input."""
    tell, sys.stdout = sys.stdout, sys.stderr
    for text in sys.stdin:
        family, shared = json.loads(text)
        append(record, run(family, shared, only))
        print(DONE if device_answers() else LAST, file=tell, flush=True)
        if not device_answers():
            return


def device_answers() -> bool:
    """False after a fault on the device: nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return not torch.cuda.is_available()
    return True


def side_by_side(
    tasks: list[tuple[str, str | None]], record: Path, jobs: int, until: float, only: list[str] | None = None
) -> None:
    """Hands families to `jobs` processes, one at a time each. A process that ends is replaced by another."""
    waiting = deque(tasks)
    threads = [Thread(target=hand_out, args=(waiting, record, until, only)) for _ in range(min(jobs, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hand_out(waiting: deque[tuple[str, str | None]], record: Path, until: float, only: list[str] | None = None) -> None:
    """Keeps one process at work until no family waits, or the time is over."""
    words = [*COMMAND, str(record.with_suffix("")), "--worker", *(f"--only={word}" for word in only or ())]
    job: subprocess.Popen[str] | None = None
    while waiting and time.perf_counter() < until:
        try:
            task = waiting.popleft()
        except IndexError:  # another thread was quicker
            break
        if job is None or job.poll() is not None:
            job = subprocess.Popen(
                words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        assert job.stdin is not None and job.stdout is not None
        print(json.dumps(task), file=job.stdin, flush=True)
        said = next((line.strip() for line in job.stdout if line.strip() in (DONE, LAST)), None)
        if said is None:
            ended = f"the process ended with exit code {job.wait()}"
            append(record, {"family": task[0], "shares": task[1], "cells": {}, "failed": [ended], "seconds": 0.0})
        elif said == LAST:
            job.wait()
    if job is not None and job.stdin is not None:
        job.stdin.close()
        job.wait()


if __name__ == "__main__":
    main()
