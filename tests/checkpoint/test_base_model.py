"""Checkpoints saved without a head (`AutoModel`), whose tensor names lack the prefix that they have beside one."""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import lamina
from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.loader import tensors_of
from lamina.checkpoint.names import find_recipes
from lamina.checkpoint.source import Checkpoint
from lamina.config import Config
from lamina.model import Model
from lamina.models import family_of
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FAMILIES

AUTO: list[tuple[str, Any, Any]] = [
    *((name, AutoModelForCausalLM, next(iter(cases.values()))) for name, cases in CASES.items()),
    *((name, AutoModelForSeq2SeqLM, next(iter(cases.values()))) for name, cases in FAMILIES.items()),
]
NO_BASE = {"encoder-decoder", "mt5", "umt5", "longt5", "switch_transformers"}
"""Families whose names have no prefix."""


class Names(Checkpoint):
    """A checkpoint of which only names are known."""

    path = Path("none")

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self.config, self.generation_config = set(names), {}, {}

    @property
    def names(self) -> Set[str]:
        return self._names

    def shape(self, name: str) -> Any: ...
    def read(self, name: str) -> Any: ...
    def tokenizer(self) -> None: ...


def expected_names(model: Model) -> set[str]:
    """The names of the first layout of every parameter."""
    paths = [(path, tuple(like.shape)) for paths, like in tensors_of(model) for path in paths]
    found = [find_recipes(model.names, path, shape) for path, shape in paths]
    return {name for recipes in found if recipes for name in recipes[0].sources}


@pytest.mark.parametrize(("name", "auto", "make"), AUTO, ids=[name for name, *_ in AUTO])
def test_names_without_the_prefix_of_the_base_model_are_found_in_every_family(name: str, auto: Any, make: Any) -> None:
    given = make()
    config = Config(given.to_dict())
    with torch.device("meta"):
        model = family_of(config).build(config)
    whole = expected_names(model)
    assert with_prefix(Names(whole), model.names).names == whole
    prefix = auto._model_mapping[type(given)].base_model_prefix + "."
    bare = {name.removeprefix(prefix) for name in whole}
    assert name in NO_BASE or bare != whole or name in {"llama4", "nemotron_h"}
    assert set(with_prefix(Names(bare), model.names).names) == whole


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba2", "bart"])
def test_a_base_model_that_transformers_saved_is_loaded_with_its_tied_head(name: str, tmp_path: Path) -> None:
    auto, make = next((auto, make) for one, auto, make in AUTO if one == name)
    config = make()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    getattr(model, model.base_model_prefix).save_pretrained(tmp_path / "base")
    whole, base = (lamina.load(tmp_path / part, device="cpu") for part in ("whole", "base"))
    assert all(torch.equal(value, base.state_dict()[path]) for path, value in whole.state_dict().items())
    found = lamina.inspect(tmp_path / "base")
    assert found.problem is None and found.unused == ()


def test_a_base_model_whose_head_is_not_tied_lacks_the_head(tmp_path: Path) -> None:
    auto, make = next((auto, make) for name, auto, make in AUTO if name == "qwen2")
    auto.from_config(make()).model.save_pretrained(tmp_path)
    with pytest.raises(lamina.CheckpointError, match=r"does not fit Qwen2; tensors\s+1 missing: lm_head\.weight$"):
        lamina.load(tmp_path, device="cpu")
