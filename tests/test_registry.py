"""The registry of families: those from outside the package, and the text part of multimodal checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

import lamina
from lamina import models
from lamina.checkpoint import open_source
from lamina.config import Config
from lamina.models.llama import Llama
from lamina.runtime.eligibility import why_no_kernels
from tests.families.cases.llama import make

NAMES = {"token": "wte", "blocks.{i}.qkv": "h.{i}.qkv", "blocks.{i}.out": "h.{i}.out", "head": "head"}


class OutsideBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.specs = {"attention": lamina.Attention(heads, self.dim, self.dim)}

    def forward(self, x: torch.Tensor, memory: Any, shared: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(memory.attend(q, k, v, scale=self.dim**-0.5).transpose(1, 2).flatten(2))


class Outside(lamina.Model):
    """A family that no file of the package knows."""

    names = NAMES

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(OutsideBlock(c.d_model, c.n_heads) for _ in range(c.n_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token(ids)

    def unembed(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


CONFIG = {"model_type": "outside", "vocab_size": 31, "d_model": 16, "n_heads": 2, "n_layers": 2, "tint": "blue"}


@pytest.fixture
def registered() -> Iterator[None]:
    assert lamina.register_family("outside")(Outside) is Outside
    yield
    lamina.unregister_family("outside")


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Outside]:
    torch.manual_seed(0)
    model = Outside.build(Config(CONFIG))
    theirs = {"token": "wte", "blocks": "h"}
    tensors = {
        ".".join([theirs.get(path.split(".")[0], path.split(".")[0]), *path.split(".")[1:]]): values
        for path, values in model.state_dict().items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path, model


@pytest.mark.usefixtures("registered")
def test_a_family_from_outside_is_loaded_planned_verified_and_would_be_captured(
    checkpoint: tuple[Path, Outside],
) -> None:
    folder, made = checkpoint
    model = lamina.load(folder, device="cpu")
    ids = torch.tensor([[1, 2, 3]])
    assert isinstance(model, Outside) and torch.equal(model(ids), made(ids))  # type: ignore[arg-type]
    assert lamina.plan(folder, length=8).weights == sum(x.nbytes for x in made.parameters())
    assert lamina.verify(model, tries=1, length=8)
    assert why_no_kernels(model.specs, None, model.dtype) is None
    assert model.config.unread == ["tint"]


def test_what_is_not_registered_is_refused_by_name(checkpoint: tuple[Path, Outside]) -> None:
    with pytest.raises(lamina.InputError, match=r"model_type 'outside' is not among the"):
        lamina.load(checkpoint[0])
    with pytest.raises(lamina.InputError, match="model_type 'outside' was not registered"):
        lamina.unregister_family("outside")
    with pytest.raises(lamina.InputError, match=r"model_type 'llama' is registered: lamina.models.llama.Llama"):
        lamina.register_family("llama", Outside)
    with pytest.raises(lamina.InputError, match=r"a family is a subclass of lamina.Model, not <class 'int'>"):
        lamina.register_family("outside", int)  # type: ignore[arg-type]


def test_an_installed_package_registers_its_family_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(load=lambda: lamina.register_family("outside", Outside))
    monkeypatch.setattr(models, "entry_points", lambda group: [entry] if group == "lamina_families" else [])
    models.import_outside_families.cache_clear()
    try:
        assert models.family("outside") is Outside
    finally:
        models.import_outside_families.cache_clear()
        lamina.unregister_family("outside")


# -- text parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("body", "head"), [("language_model.", "language_model."), ("model.language_model.", "")])
def test_the_text_part_of_a_multimodal_checkpoint_is_found_under_every_spelling(
    tmp_path: Path, body: str, head: str
) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    plain = lamina.load(tmp_path, device="cpu")
    stored = load_file(tmp_path / "model.safetensors")
    inside = "model." if body == "language_model." else ""
    renamed = {
        head + name if name.startswith("lm_head") else body + inside + name.removeprefix("model."): values
        for name, values in stored.items()
    }
    towers = {"vision_tower.conv.weight": torch.zeros(3, 2), "model.projector.weight": torch.zeros(2)}
    save_file(renamed | towers, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral3", "text_config": text, "vision_config": {}})
    )
    model = lamina.load(tmp_path, device="cpu")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert type(model).__name__ == "LlamaTextPart" and isinstance(model, Llama)
    assert torch.equal(model(ids), plain(ids))  # type: ignore[arg-type]
    part = type(model).part_of(open_source(tmp_path))
    assert part.skipped == sorted(towers)  # type: ignore[attr-defined]
    assert lamina.plan(tmp_path, length=8).weights == lamina.plan(plain, length=8).weights


def test_the_text_part_is_tied_as_the_outer_configuration_says() -> None:
    text = make(tie_word_embeddings=False).to_dict()
    config = Config(
        {"model_type": "mistral3", "text_config": text | {"odd": 1}, "tie_word_embeddings": True, "image": 2}
    )
    model = models.family_of(config).build(config)
    assert model.head.weight is model.embedding.weight  # type: ignore[union-attr]
    assert config.unread == ["text_config.odd"]
