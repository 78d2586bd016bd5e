"""Checkpoints in the layout in which transformers 5 holds a model (save_original_format=False): experts in stacks,
projections joined, other names than in published files. Only names and shapes are compared."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from lamina.checkpoint.base_model import with_prefix
from lamina.checkpoint.loader import plan
from lamina.checkpoint.source import Checkpoint
from lamina.config import Config
from lamina.models import family_of
from tests.families.cases import CASES
from tests.families.encoder_decoder_cases import FAMILIES

EVERY: list[tuple[str, Any, Any]] = [
    *((name, AutoModelForCausalLM, next(iter(cases.values()))) for name, cases in CASES.items()),
    *((name, AutoModelForSeq2SeqLM, next(iter(cases.values()))) for name, cases in FAMILIES.items()),
]


class Shapes(Checkpoint):
    """A checkpoint of which names and shapes are known."""

    path = Path("held")

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes, self.config, self.generation_config = shapes, {}, {}

    @property
    def names(self) -> Set[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        return torch.zeros(self._shapes[name])

    def tokenizer(self) -> None: ...


@pytest.mark.parametrize(("name", "auto", "make"), EVERY, ids=[name for name, *_ in EVERY])
def test_a_state_dict_of_transformers_fits(name: str, auto: Any, make: Any) -> None:
    given = make()
    config = Config(given.to_dict())
    with torch.device("meta"):
        theirs, ours = auto.from_config(given), family_of(config).build(config)
    source = Shapes({key: tuple(value.shape) for key, value in theirs.state_dict().items()})
    assert plan(ours, with_prefix(ours.part_of(source), ours.names), ours.names, torch.float32, tuple(ours.ignored))
