"""Instructions that the processor executes for a token, over transformers' own caches and over ours.

`python -m bench.bridge.instructions MODEL TOKENS` prints them for one model of `bench.bridge.host`, whose caches hold
TOKENS tokens. It runs itself under valgrind, which counts them one by one: they do not depend on what else the
machine does. That takes minutes.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lamina.bridge.lines import AHEAD


def instructions(name: str, context: int) -> dict[str, float] | None:
    """Form and whose -> instructions of a token; None if valgrind is not installed."""
    if shutil.which("valgrind") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "counts", Path(folder) / "said"
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [sys.executable, "-m", "bench.bridge.instructions", name, str(context), "--counted"]
        with (
            said.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as counted,
        ):
            assert counted.stdin is not None and counted.stdout is not None
            for line in counted.stdout:  # what valgrind is to do, from `_control`
                request = line.strip()
                if request.startswith("--"):
                    control = ["callgrind_control", request, str(counted.pid)]
                    subprocess.run(control, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
                    counted.stdin.write("done\n")
                    counted.stdin.flush()
        if counted.returncode:
            sys.exit(f"valgrind failed:\n{said.read_text()[-2000:]}")
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
    return trigger, total / AHEAD


def run(name: str, context: int) -> None:
    """Decodes a turn of tokens over each cache, while callgrind counts."""
    import torch

    from bench.bridge import host

    torch.set_num_threads(1)
    gc.disable()  # it would run in some turns and not in others
    model = host.make_model(name)
    with torch.inference_mode():
        for form, one in host.forms(model.config, context).items():
            for whose, (its_model, cache) in zip(("theirs", "ours"), host.pair(model, *one), strict=True):
                _control("--instr=on")
                _control("--zero")
                host.turn(its_model, cache)
                _control(f"--dump={form}: {whose}".replace(" ", "_"))
                _control("--instr=off")


def _control(request: str) -> None:
    """Has the process that started this one control valgrind: to start another from here costs up to a million
    instructions, which would be counted."""
    print(request, flush=True)
    sys.stdin.readline()


def main() -> None:
    name, context = sys.argv[1], int(sys.argv[2])
    if "--counted" in sys.argv:
        run(name, context)
        return
    found = instructions(name, context)
    if found is None:
        sys.exit("valgrind is not installed")
    for form, count in sorted(found.items()):
        print(f"{form}: {count / 1e3:.0f} thousand instructions a token")


if __name__ == "__main__":
    main()
