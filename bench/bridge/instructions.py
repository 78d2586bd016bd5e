"""Instructions that the processor executes for a token, over transformers' own caches and over ours.

`python -m bench.bridge.instructions MODEL` prints them for one model of `bench.bridge.host`. It runs itself under
valgrind, which counts them one by one: they do not depend on what else the machine does. That takes minutes.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOKENS = 16  # views are made for as many at once


def instructions(name: str) -> dict[str, float] | None:
    """Form and whose -> instructions of a token; None if valgrind is not installed."""
    if shutil.which("valgrind") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [sys.executable, "-m", "bench.bridge.instructions", name, "--counted"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"valgrind failed:\n{done.stderr[-2000:]}")
        return dict(_read(path) for path in Path(folder).glob("counts.*"))


def _read(path: Path) -> tuple[str, float]:
    """What a file of callgrind is called, and the instructions of a token in it."""
    trigger, total = "", 0
    with path.open() as file:
        for line in file:
            if line.startswith("desc: Trigger: dump "):
                trigger = line.removeprefix("desc: Trigger: dump ").strip().replace("_", " ")
            elif line.startswith("totals: "):
                total = int(line.split()[1])
    return trigger, total / TOKENS


def run(name: str) -> None:
    """Decodes TOKENS tokens over each cache, while callgrind counts."""
    import torch

    from bench.bridge import host

    torch.set_num_threads(1)
    gc.disable()  # it would run in some turns and not in others
    model = host.make_model(name)
    with torch.inference_mode():
        for form, one in host.forms(model.config).items():
            for whose, (its_model, cache) in zip(("theirs", "ours"), host.pair(model, *one), strict=True):
                _control("--instr=on")
                _control("--zero")
                host.turn(its_model, cache)
                _control(f"--dump={form}: {whose}".replace(" ", "_"))
                _control("--instr=off")


def _control(command: str) -> None:
    subprocess.run(["callgrind_control", command, str(os.getpid())], stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    name = sys.argv[1]
    if "--counted" in sys.argv:
        run(name)
        return
    found = instructions(name)
    if found is None:
        sys.exit("valgrind is not installed")
    for form, count in found.items():
        print(f"{form}: {count / 1e3:.0f} thousand instructions a token")


if __name__ == "__main__":
    main()
