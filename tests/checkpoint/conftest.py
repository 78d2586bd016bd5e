"""Small checkpoints written into a temporary folder."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.vocab_files import SPM, TEXTS, Processor

Tensors = dict[str, torch.Tensor]
SaveFolder = Callable[..., Path]


@pytest.fixture
def save_folder(tmp_path: Path) -> SaveFolder:
    """Write a checkpoint folder: config, and either one file or several shards with an index."""

    def save(tensors: Tensors, config: dict[str, Any] | None = None, shards: int = 0, name: str = "model") -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        if not shards:
            save_file(tensors, tmp_path / f"{name}.safetensors")
            return tmp_path
        places = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
            save_file(part, tmp_path / file)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return save


@pytest.fixture
def read_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives transformers what was written, which it reads with packages that are not installed here."""

    def extractor(self: Any, model: str) -> None:
        self.proto = SPM[str(model)].proto()

    module = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(module.SentencePieceExtractor, "__init__", extractor)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("sentencepiece")
    package.SentencePieceProcessor = Processor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    base = importlib.import_module("transformers.tokenization_utils_sentencepiece")
    monkeypatch.setattr(base, "requires_backends", lambda *given: None)
    monkeypatch.setattr(base, "spm", package, raising=False)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt of a byte-level BPE."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("bytes")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.model.save(str(folder))
    return folder
