"""`lamina verify`: what it refuses, in one line, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from lamina.cli import commands
from tests.families.cases.llama import make


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tries", "0", "tries=0: give a whole number of at least 1, or nothing would be checked"),
        ("--tries", "-3", "tries=-3: give a whole number of at least 1, or nothing would be checked"),
        ("--length", "0", "length=0: give a whole number of at least 2, or a row could not be cut"),
        ("--length", "1", "length=1: give a whole number of at least 2, or a row could not be cut"),
        ("--seed", "-1", "seed=-1: give a whole number of at least 0, or there are no such draws"),
    ],
)
def test_numbers_that_would_check_nothing_are_refused_in_one_line(option: str, value: str, said: str) -> None:
    done = CliRunner().invoke(commands(), ["verify", "nowhere", option, value])  # before anything is loaded
    assert done.exit_code == 2
    assert done.stderr == f"lamina: {said}\n"
    assert done.stdout == ""


def test_an_unknown_residence_is_refused_in_one_line_and_a_verdict_counts_cases(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    done = CliRunner().invoke(commands(), ["verify", str(tmp_path), "--residence", "moon"])
    assert done.exit_code == 2
    assert done.stderr.startswith("lamina: ") and done.stderr.count("\n") == 1
    done = CliRunner().invoke(commands(), ["verify", str(tmp_path), "--length", "4", "--tries", "1"])
    assert done.exit_code == 0, done.stdout
    assert done.stdout.endswith("ok: the cache changes nothing, in 120 cases of 12 laws\n")
    assert done.stderr == ""
