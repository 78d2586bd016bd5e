"""A small tokenizer and a small model that reads with it, for tests about text."""

from __future__ import annotations

import functools

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from lamina.checkpoint import Tokenizer
from lamina.config import Config
from lamina.model import Model
from lamina.models.llama import Llama
from tests.families.cases.llama import make

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAMPLE = [
    "the theory of the thing is that they think",
    "http://there.is/https",
    "日本語 naïve 😀👩",
    "user\nassistant\n",
]


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE trained on a few sentences, with a chat template."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE * 3, trainer)
    return Tokenizer(
        backend, eos_ids=(2,), bos_id=1, templates={"default": CHATML},
        special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    )  # fmt: skip


@functools.cache
def reader() -> Model:
    """A random llama that knows the tokens of `tokenizer`."""
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(make(vocab_size=tokenizer().vocab_size, max_position_embeddings=1024))
    model = Llama.build(Config(theirs.config.to_dict()))
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    model.tokenizer = tokenizer()
    return model


@functools.cache
def unreadable() -> tuple[int, ...]:
    """Ids that are not printable text by themselves: special ones, and parts of characters."""
    texts = [tokenizer().decode([id]) for id in range(tokenizer().vocab_size)]
    return tuple(id for id, text in enumerate(texts) if not text or not text.isascii() or not text.isprintable())
