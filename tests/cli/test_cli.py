"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import lamina as library
from lamina.cli import commands
from tests.families.cases.llama import make
from tests.generation.text import CHATML, tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(folder)
    return folder


def lamina(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lamina", *words], capture_output=True, text=True, timeout=120)


def run(*words: str | Path, said: str = "") -> Result:
    """The same in this process, which is quicker."""
    return CliRunner().invoke(commands(), [str(word) for word in words], input=said)


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
    done = run("inspect", checkpoint)
    assert done.exit_code == 0, done.stderr
    assert "0  attention: Attention(kv_heads=2, key_dim=8, value_dim=8, window=Full())" in done.stdout


def test_a_path_that_is_not_there_is_told_in_one_line() -> None:
    done = run("verify", "nowhere")
    assert done.exit_code == 2
    assert done.stderr.startswith("lamina: ")
    assert "nowhere" in done.stderr


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, whose own way is to draw."""
    folder = tmp_path_factory.mktemp("reader")
    torch.manual_seed(0)
    LlamaForCausalLM(make(vocab_size=tokenizer().vocab_size, eos_token_id=2)).save_pretrained(folder)
    tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9}))
    return folder


def text_of(folder: Path, prompt: str, **settings: object) -> str:
    return library.load(folder, device="cpu").generate(prompt, 6, **settings).text[0]


def test_generate_continues_a_text_as_asked(reader: Path) -> None:
    for words, settings in (
        (["--greedy"], dict(do_sample=False)),
        (["--seed", "3"], dict(seed=3)),
        (["--seed", "3", "--temperature", "2", "--top-k", "9", "--top-p", "0.9"],
         dict(seed=3, do_sample=True, temperature=2.0, top_k=9, top_p=0.9)),
    ):  # fmt: skip
        done = run("generate", reader, "the theory", "-n", "6", *words)
        assert done.exit_code == 0, done.stderr
        assert done.stdout == "the theory" + text_of(reader, "the theory", **settings)
        assert "tokens/s" in done.stderr


def test_chat_answers_a_question_or_talks_until_the_end_of_input(reader: Path) -> None:
    asked = run("chat", reader, "a thing", "-n", "6", "--greedy")
    answer = text_of(reader, [{"role": "user", "content": "a thing"}], do_sample=False)  # type: ignore[arg-type]
    assert asked.exit_code == 0 and asked.stdout.startswith(f"> a thing\n\n{answer}\n\n")
    talked = run("chat", reader, "-n", "6", "--greedy", said="a thing\nthey\n")
    assert talked.exit_code == 0 and f"> {answer}\n> " in talked.stdout


def test_settings_that_cannot_be_are_told_in_one_line(reader: Path, checkpoint: Path) -> None:
    for words, text in (
        (["generate", reader, "the", "-n", "0"], "max_new_tokens=0: it must be a whole number"),
        (["generate", reader, "the", "--top-p", "3"], "top_p=3.0: it must be"),
        (["generate", reader, "the", "--greedy", "--top-k", "3"], "it changes only what is drawn"),
        (["generate", checkpoint, "the"], "no tokenizer"),
        (["chat", checkpoint, "the"], "no tokenizer"),
        (["chat", reader, "the", "--temperature", "-1"], "temperature=-1.0: it must be"),
    ):
        done = run(*words)
        assert done.exit_code == 2
        assert done.stderr.strip().splitlines()[-1].startswith("lamina: ") and text in done.stderr
