"""What has a target and needs a GPU, in parts of at most nine minutes: `python -m bench.gpu_targets PART OUT`

A part runs its commands one after the other, each with a limit of seconds. What a command prints is shown, and written
to OUT/NN-name.log. One that fails or is stopped at its limit does not keep the others from running; the exit code is 1
then. Without OUT the commands of the part are only listed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Command(NamedTuple):
    """
    words     what is run, by this Python
    seconds   its limit
    target    the figure that is asked for, and of which line
    """

    words: str
    seconds: float
    target: str


LLAMA = "-m lamina bench --shape llama-3.1-8b --prefill 0 --no-first-token --context 128"
PARTS: dict[str, list[Command]] = {
    "packed": [
        Command("-m bench.kernels.packed_search --rows 32 --only int4", 200, "products of 32 vectors: fastest tiles"),
        Command(f"{LLAMA} --weights int4 --rows 1,32", 110, "1 row 60 % of the limit; 32 rows 1.3 x bfloat16"),
        Command(f"{LLAMA} --rows 32", 50, "bfloat16 beside them"),
        Command(f"{LLAMA} --weights int8 --rows 1,32", 80, "1 row 75 % of the limit"),
        Command(f"{LLAMA} --weights fp8 --rows 1,32", 80, "1 row 75 % of the limit"),
    ],
    "prompts": [
        Command("-m bench.short_prompts llama-3.1-8b --tokens 64,512", 70, "7.5 and 15 ms, host below 1 ms"),
        Command("-m bench.prefill_table llama-3.1-8b:64 llama-3.1-8b:512", 70, "7.5 and 15 ms, by generate"),
        Command("-m bench.bridge", 240, "at most 1.03 x at 128 tokens, below 1 at 16,384"),
        Command("-m bench.packed_checks", 150, "bfloat16 error at most twice that of plain passes"),
    ],
    "families": [
        Command("-m bench.device_check {out}/device-check.md --jobs 16 --only prompt --seconds 470", 520, "all yes"),
    ],
}


def run(command: Command, log: Path) -> str | None:
    """Shows and writes what the command prints; -> why it failed, None if it did not."""
    words = [sys.executable, *shlex.split(command.words.format(out=log.parent))]
    begun = time.perf_counter()
    print(f"\n== {shlex.join(words[1:])}\n== asked: {command.target}", flush=True)
    with open(log, "w") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(command.seconds)
            failed = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            process.wait()
            failed = f"stopped after {command.seconds:.0f} s"
    print(log.read_text(errors="replace"), end="")
    print(f"== {failed or 'done'}, {time.perf_counter() - begun:.0f} s", flush=True)
    return failed


def main() -> None:
    names = sys.argv[1:]
    if not 1 <= len(names) <= 2 or names[0] not in PARTS:
        sys.exit(f"python -m bench.gpu_targets PART OUT: the parts are {', '.join(PARTS)}")
    commands = PARTS[names[0]]
    if len(names) == 1:
        for command in commands:
            print(f"python {command.words}  # {command.target}; at most {command.seconds:.0f} s")
        return
    out = Path(names[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    logs = [out / f"{i:02}-{command.words.split()[1].replace('.', '-')}.log" for i, command in enumerate(commands)]
    failed = [log.name for log, command in zip(logs, commands, strict=True) if run(command, log)]
    if failed:
        sys.exit(f"not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
