"""Exporting the demo model, and how fast its programs decode: `python -m bench.export [--device cuda] [--model NAME]`

Exports SmolLM2 to .pt2 and to AOTInductor, builds the C++ decode program, checks that all give the tokens of eager
decoding, and times AOTInductor in C++ against `model.compile()` (on a GPU: captured decoding) by turns in one run.
`--model toy` takes a small random Llama instead, which is enough to see that a machine can do all of this. Where the
C++ program cannot be built, the compiled programs are timed from Python, and the reason is printed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch

import lamina
from lamina import Model, Program, ProgramError
from lamina.exporting.aotinductor import compile_to
from lamina.exporting.build_decode import build

ROWS, CAPACITY, STEPS, TURNS = 1, 512, 128, 20
CONFIG = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


class Decoder:
    """The C++ program in a process of its own, which stays between turns."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, prompt: list[int], steps: int) -> tuple[list[int], float]:
        """-> the ids, and seconds a step"""
        assert self.process.stdin and self.process.stdout and self.process.stderr
        ids = ",".join(map(str, prompt))
        self.process.stdin.write(f"reset\nfeed {ids}\ndecode {steps}\n")
        self.process.stdin.flush()
        made = [int(i) for i in self.process.stdout.readline().split()]
        said = self.process.stderr.readline()
        if "steps/s" not in said:
            sys.exit(f"the C++ program failed: {said}{self.process.stderr.read()}")
        return made, 1 / float(said.split()[0])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def random_llama(device: str) -> Model:
    from lamina.bench.random_model import random_model

    return random_model(CONFIG, torch.float32, torch.device(device))


def eager(model: Model, prompt: list[int], steps: int) -> tuple[list[int], float]:
    """-> ids of greedy decoding, and seconds a step after the prompt"""
    cache = model.new_cache(ROWS, capacity=CAPACITY)
    times: list[float] = []

    def note(_: object) -> None:
        times.append(time.perf_counter())

    made = model.generate([prompt], max_new_tokens=steps, cache=cache, stream=note).tokens[0]
    return made, (times[-1] - times[0]) / (len(times) - 1)


def tokens_of(program: Program, prompt: list[int]) -> tuple[list[int], float]:
    """-> ids of greedy decoding by a program, and seconds a step after the prompt"""
    times: list[float] = []
    made = program.generate([prompt], STEPS, on_token=lambda row, token: times.append(time.perf_counter())).tokens[0]
    return made, (times[-1] - times[0]) / (len(times) - 1)


def size(path: Path) -> float:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 2**20


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--model", default="smollm2")
    options.add_argument("--out", type=Path, help="the .md file to write")
    given = options.parse_args()
    if shutil.which("g++") is None:
        sys.exit("there is no g++ on this machine, which AOTInductor and the C++ program need")
    if given.model == "toy":
        model = random_llama(given.device)
    else:
        model = lamina.load(given.model, "float32", given.device, weights="plain")
    prompt = (
        list(range(5, 37))
        if model.tokenizer is None
        else model.tokenizer.encode("Once upon a time there was a king who")
    )
    weights = sum(p.nbytes for p in {p.data_ptr(): p for p in model.parameters()}.values()) / 2**20
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("| | seconds | MiB |\n|---|---|---|")
        begin = time.perf_counter()
        made = lamina.export(model, ROWS, CAPACITY, to=folder / "model.pt2")
        say(f"| export to .pt2 | {time.perf_counter() - begin:.1f} | {size(folder / 'model.pt2'):.1f} |")
        say(f"| weights in memory | | {weights:.1f} |")
        cache = sum(tensor.nbytes for tensor in made.cache.values()) / 2**20
        say(f"| cache in memory, in no file | | {cache:.1f} |")
        begin = time.perf_counter()
        compile_to(made, folder / "model.aoti")
        took = time.perf_counter() - begin
        say(f"| AOTInductor, from the traced programs | {took:.1f} | {size(folder / 'model.aoti'):.1f} |")
        expected = eager(model, prompt, STEPS)[0]
        compiled = Program.load(folder / "model.aoti")
        agreed = {
            "pt2": tokens_of(Program.load(folder / "model.pt2"), prompt)[0] == expected,
            "AOTInductor in Python": tokens_of(compiled, prompt)[0] == expected,
        }
        subjects: dict[str, Callable[[], tuple[list[int], float]]] = {}
        decoder = None
        begin = time.perf_counter()
        try:
            built = build(folder / "decode")
        except ProgramError as error:
            say(f"\nthe C++ program was not built: {error}\n")
            subjects["AOTInductor, Python"] = lambda: tokens_of(compiled, prompt)
        else:
            say(f"| the C++ program | {time.perf_counter() - begin:.1f} | {size(built):.1f} |")
            decoder = Decoder(built, folder / "model.aoti")
            subjects["AOTInductor, C++"] = partial(decoder.run, prompt, STEPS)
        if model.device.type == "cpu":
            model.compile()
        other = "model.compile()" if model.device.type == "cpu" else "captured steps"
        subjects[other] = lambda: eager(model, prompt, STEPS)
        for what, run in subjects.items():
            agreed[what] = run()[0] == expected  # also warms up
        say("\ntokens as eager: " + ", ".join(f"{what} {'yes' if same else 'NO'}" for what, same in agreed.items()))
        taken: dict[str, list[float]] = {what: [] for what in subjects}
        for _ in range(TURNS):
            for what, run in subjects.items():
                taken[what].append(run()[1])
        if decoder is not None:
            decoder.close()
    medians = {what: statistics.median(times) for what, times in taken.items()}
    say(f"\n| decoding {STEPS} tokens, {ROWS} row | ms a step | spread of {TURNS} turns |\n|---|---|---|")
    for what, times in taken.items():
        spread = (max(times) - min(times)) / medians[what]
        say(f"| {what} | {1e3 * medians[what]:.3f} | {spread:.1%} |")
    first, second = medians.values()
    say(f"\nAOTInductor takes {first / second:.3f} × the time of the other.")
    if given.out is not None:
        head = f"Export of {given.model}, {given.device}, {torch.get_num_threads()} threads, "
        head += f"PyTorch {torch.__version__}, {date.today()}."
        given.out.write_text(f"{head} Command: `python -m bench.export`.\n\n" + "\n".join(lines) + "\n")
    if not all(agreed.values()):
        sys.exit("tokens differ")


if __name__ == "__main__":
    main()
