"""A checkpoint with a tokenizer, and what `lamina export` and `lamina run` make of it for a target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

import lamina
from lamina.cache.io.fingerprint import Fingerprint
from lamina.cli import commands
from tests.exporting.kinds import file_name
from tests.families.cases.llama import make
from tests.generation.text import CHATML, tokenizer


def checkpoint(folder: Path) -> Path:
    """Writes a random llama whose generation config draws."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=tokenizer().vocab_size, eos_token_id=2, num_hidden_layers=1)
    LlamaForCausalLM(make(**sizes)).save_pretrained(folder)
    tokenizer().backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.9}))
    return folder


def run(*words: str | Path) -> str:
    """What a command prints to standard output."""
    done = CliRunner().invoke(commands(), [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def check_commands(target: str, folder: Path) -> Path:
    """`lamina export` and `lamina run` continue a text and a chat as `model.generate` does. -> the archive"""
    source, file = checkpoint(folder / "checkpoint"), folder / file_name(target)
    run("export", source, "--to", file, "--target", target, "--capacity", "64", "--chunk", "8")
    model = lamina.load(source, device="cpu")
    assert model.tokenizer is not None
    expected = model.generate("the theory", max_new_tokens=9, do_sample=False).text[0]
    assert run("run", file, "the theory", "-n", "9") == expected + "\n"
    ids = model.tokenizer.chat_ids([{"role": "user", "content": "they think"}])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False).text[0]
    assert run("run", file, "they think", "-n", "5", "--chat") == expected + "\n"
    assert lamina.Program.load(file).manifest.fingerprint == Fingerprint.of(model).as_values()
    return file
