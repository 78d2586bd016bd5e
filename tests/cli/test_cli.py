"""The commands, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.families.cases.llama import make


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(folder)
    return folder


def lamina(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lamina", *words], capture_output=True, text=True, timeout=120)


def test_verify_prints_the_table_and_exits_with_0(checkpoint: Path) -> None:
    done = lamina("verify", str(checkpoint), "--length", "10", "--tries", "1")
    assert done.returncode == 0, done.stderr
    assert "ok: the cache changes nothing" in done.stdout


def test_verify_exits_with_1_when_a_law_fails(checkpoint: Path) -> None:
    script = (
        "import sys, torch; from lamina.models.llama import Llama; from lamina.cli import main\n"
        "right = Llama.prepare\n"
        "Llama.prepare = lambda self, p: right(self, torch.arange(p.shape[1]).expand_as(p))\n"
        f"sys.argv = ['lamina', 'verify', {str(checkpoint)!r}, '--length', '8', '--tries', '1']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "FAILED, first at layer 0 (attention)" in done.stdout


def test_inspect_shows_what_each_layer_remembers(checkpoint: Path) -> None:
    done = lamina("inspect", str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert "0  attention: Attention(kv_heads=2, key_dim=8, value_dim=8, window=Full())" in done.stdout


def test_a_path_that_is_not_there_is_told_in_one_line() -> None:
    done = lamina("verify", "nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("lamina: ")
    assert "nowhere" in done.stderr
