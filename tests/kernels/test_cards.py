"""Every kernel builds for cards with little and with much shared memory, and asks for no more than there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lamina.kernels
from lamina.kernels.limits import CARDS
from tests.kernels.configurations import configurations

LAUNCHED = re.compile(r"\blaunch\(\s+(\w+),")
RECORDED = Path(__file__).parent / "h200.txt"


def kernels_launched() -> set[str]:
    """The names of all kernels that are launched anywhere."""
    files = Path(lamina.kernels.__file__).parent.rglob("*.py")
    return {name for file in files for name in LAUNCHED.findall(file.read_text()) if file.name != "launch.py"}


@pytest.mark.parametrize("card", [86, 90, 120])
def test_every_kernel_builds_for_a_card_within_its_shared_memory_and_registers(card: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.cards", str(card)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == kernels_launched()
    assert [line for line in lines if int(line[1]) > CARDS[card].shared] == []
    assert [line for line in lines if int(line[2]) > 255] == []


@pytest.mark.parametrize("shape", dict.fromkeys(line.split(":")[0] for line in RECORDED.read_text().splitlines()))
def test_configurations_on_an_h200_are_those_that_were_measured(shape: str) -> None:
    """`python -m tests.kernels.configurations 90 > tests/kernels/h200.txt`, once others are measured to be faster."""
    recorded = [line for line in RECORDED.read_text().splitlines() if line.startswith(f"{shape}: ")]
    assert configurations(CARDS[90], shape) == recorded
