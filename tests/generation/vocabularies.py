"""Tokenizers that give the same texts other ids, and models that read with them, for tests."""

from __future__ import annotations

import copy
import functools
import json
import random
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig

from lamina.checkpoint import Tokenizer
from lamina.config import Config
from lamina.model import Model
from lamina.models.llama import Llama
from tests.generation.text import SAMPLE
from tests.generation.text import tokenizer as bytes_bpe

TEXTS = [*SAMPLE, "one two three four five six seven", "unbelievable things happened yesterday, didn't they?"]
FEW = 67  # ids of the families' test models


@functools.cache
def other_bpe() -> Tokenizer:
    """Byte-level BPE of other merges, with a beginning-of-text token and without the chat's tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return Tokenizer(backend, eos_ids=(1,), bos_id=0, add_bos=True)


@functools.cache
def pieces() -> Tokenizer:
    """Pieces with "▁" for a space, one of which is put before every text and taken off again; bytes for the unknown."""
    single = [f"<0x{n:02X}>" for n in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<unk>", "<s>", "</s>", *single], limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] not in single]
    return Tokenizer(Backend.from_str(json.dumps(state)), eos_ids=(2,), bos_id=1, add_bos=True)


TOKENIZERS = {"bytes": bytes_bpe, "other bytes": other_bpe, "pieces": pieces}


@functools.cache
def few(*texts: str) -> Tokenizer:
    """One of 67 ids: pieces of these texts; without texts, 67 single characters."""
    if not texts:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456 .,é日本語😀"
        backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    else:
        backend = Backend(models.BPE())
        alphabet = list("abcdefghijklmnopqrstuvwxyz .,")
        trainer = trainers.BpeTrainer(
            vocab_size=FEW, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    backend.decoder = decoders.Fuse()
    assert backend.get_vocab_size() == FEW
    return Tokenizer(backend)


def reads(model: Model, tokenizer: Tokenizer) -> Model:
    """The same model, weights and all, that reads with this tokenizer."""
    other = _copied(model)
    other.tokenizer = tokenizer
    other.generation_defaults = {"eos_token_id": list(tokenizer.eos_ids)}
    return other


def with_permuted_ids(model: Model, seed: int = 0) -> Model:
    """The same model with other ids for the same tokens. It shares all weights but the tables."""
    assert model.tokenizer is not None
    order = list(range(model.vocab))  # new id -> old id
    random.Random(seed).shuffle(order)
    other = _copied(model)
    for module in other.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.shape[0] == model.vocab:
                module._parameters[name] = torch.nn.Parameter(parameter[order], requires_grad=False)
    other.start_ids = tuple(order.index(id) for id in model.start_ids)
    return reads(other, _permuted(model.tokenizer, order))


def _permuted(tokenizer: Tokenizer, order: list[int]) -> Tokenizer:
    new = {old: i for i, old in enumerate(order)}
    state: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    state["model"]["vocab"] = {token: new[id] for token, id in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = new[added["id"]]
    return Tokenizer(
        Backend.from_str(json.dumps(state)),
        eos_ids=[new[id] for id in tokenizer.eos_ids],
        bos_id=None if tokenizer.bos_id is None else new[tokenizer.bos_id],
    )


def _copied(model: Model) -> Model:
    """A model of its own over the same parameters."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    memo[id(model.tokenizer)] = None
    return copy.deepcopy(model, memo)


@functools.cache
def llama(name: str, seed: int = 0) -> Model:
    """A small random model that reads with one of the tokenizers."""
    tokenizer = TOKENIZERS[name]()
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=tokenizer.vocab_size, max_position_embeddings=512,
    )  # fmt: skip
    model = Llama.build(Config(config.to_dict()))
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.tokenizer = tokenizer
    return model
