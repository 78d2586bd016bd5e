"""The target "aotinductor": compiled programs give the tokens of eager passes, in Python and in C++."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lamina
from lamina import Cache, Program, ProgramError
from lamina.attention.window import Sliding
from lamina.exporting.aotinductor import check_libraries, compile_to
from lamina.exporting.build_decode import build
from lamina.recurrence import SelectiveScan
from tests.exporting.stack import Mix, run_both
from tests.laws.toys import Attend, Recur, Toy

ROWS, CAPACITY, SLACK = 2, 40, 2
FAST = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp.simdlen": 1}  # compiles faster; the programs are small

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def model() -> Toy:
    """A ring, a line, a state and experts."""
    return Toy(Attend(Sliding(4)), Attend(), Recur(SelectiveScan(channels=4, state=3)), Mix())


@pytest.fixture(scope="module")
def folder(model: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aotinductor") / "model"
    compile_to(lamina.export(model, ROWS, CAPACITY, slack=SLACK, chunk=7), path, **FAST)
    return path


def new_cache(model: Toy) -> Cache:
    return model.new_cache(ROWS, capacity=CAPACITY, slack=SLACK)


def eager(model: Toy, commands: list[str]) -> list[list[int]]:
    """What the C++ program should print for these commands, from eager passes."""
    cache, following, printed = new_cache(model), [-1] * ROWS, []

    def feed(rows: list[list[int]]) -> None:
        ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        logits = model(ids, cache=cache, counts=[len(row) for row in rows], logits="last")
        assert logits is not None
        for row, given in enumerate(rows):
            following[row] = int(logits[row].argmax()) if given else following[row]

    for command in commands:
        name, *words = command.split()
        if name == "feed":
            feed([[] if word == "-" else [int(i) for i in word.split(",")] for word in words])
        elif name == "rewind":
            cache.rewind([int(word) for word in words])
        elif name == "reset":
            cache.reset([int(word) for word in words] or None)
        else:
            made: list[list[int]] = [[] for _ in range(ROWS)]
            for _ in range(int(words[0])):
                for row, token in enumerate(following):
                    made[row].append(token)
                feed([[token] for token in following])
            printed += made
    return printed


def test_a_compiled_program_equals_eager_passes_past_its_window(model: Toy, folder: Path) -> None:
    program, cache = Program.load(folder), new_cache(model)
    for seed in range(3):
        run_both(model, cache, program, 9, seed=seed)
        program.rewind([1, 2])
        cache.rewind([1, 2])
    program.reset([0])
    cache.reset([0])
    run_both(model, cache, program, 9, seed=3)


def test_the_cpp_program_decodes_the_tokens_of_eager_passes(model: Toy, folder: Path, tmp_path: Path) -> None:
    decode = build(tmp_path / "decode", "-O0")

    def run(*commands: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([decode, folder], input="\n".join(commands), capture_output=True, text=True)

    start = ["feed 1,2,3,4,5,6,7,8,9 10,11", "decode 16"]  # four times past the window
    back = ["rewind 2 1", "feed 3 -", "feed - 4", "decode 6"]
    commands = [*start, *back, "reset 1", "feed - 5,6,7", "decode 3", "reset", *start]
    done = run(*commands)
    assert done.returncode == 0, done.stderr
    assert [[int(i) for i in line.split()] for line in done.stdout.splitlines()] == eager(model, commands)

    refused = run("feed 1 2", "decode 40")
    assert refused.returncode == 1
    assert "row 0 holds 40 tokens and 1 more were given, but the program has room for 40" in refused.stderr
    assert "ids are 0 to 12" in run("feed 13 -").stderr
    assert "row 0 cannot be rewound by 3" in run("feed 1,2,3,4,5,6,7,8,9 -", "rewind 3 0").stderr
    assert "1 lists of ids were given, and the program has 2 rows" in run("feed 1").stderr


def test_one_row_is_decoded_from_its_own_length(tmp_path: Path) -> None:
    model = Toy(Attend())
    made = lamina.export(model, 1, 8, chunk=3)
    del made.programs["prefill"]  # decode alone compiles faster
    made.manifest = replace(made.manifest, programs={"decode": made.manifest.programs["decode"]})
    compile_to(made, tmp_path / "model", **FAST)
    program, cache = Program.load(tmp_path / "model"), model.new_cache(1, capacity=8)
    for token in (1, 5, 2, 7):  # a clock of one element must not be folded into the code as the 0 that it was
        program.feed([[token]])
        expected = model(torch.tensor([[token]]), cache=cache, logits="last")
        torch.testing.assert_close(program.logits, expected, rtol=1e-9, atol=1e-9)


def test_a_folder_that_exists_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(ProgramError, match="give the path of a new folder"):
        compile_to(None, folder)  # type: ignore[arg-type]  # refused before the programs are looked at


@pytest.mark.skipif(sys.platform != "linux", reason="the C++ libraries of Linux")
def test_a_library_with_a_cpp_library_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, library = tmp_path / "step.cpp", tmp_path / "step.so"
    source.write_text("#include <iostream>\nvoid step() { std::cout << 1; }\n")

    def package(*flags: str) -> Path:
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, *flags], check=True)
        with zipfile.ZipFile(tmp_path / "package.pt2", "w") as archive:
            archive.write(library, "model/step.so")
        return tmp_path / "package.pt2"

    check_libraries(package())
    monkeypatch.setenv("CXX", "/opt/bin/g++")
    with pytest.raises(ProgramError, match=r"step.so has a C.* of its own.*compiler /opt/bin/g.. links .* statically"):
        check_libraries(package("-static-libstdc++"))
