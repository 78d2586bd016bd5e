"""A small random model of every family, made from configurations alone, and a walk over the tensors of a cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lamina import Cache, Model
from lamina.bench.random_model import random_model
from tests.families.cases import FIRST, cases

T5 = dict(
    model_type="t5", d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=3, num_decoder_layers=3, vocab_size=67,
    relative_attention_num_buckets=8, layer_norm_epsilon=1e-6,
)  # fmt: skip

FAMILIES = [*dict(FIRST), "t5"]


@functools.cache
def config(family: str) -> dict[str, Any]:
    if family == "t5":
        return T5
    found = cases(family)[dict(FIRST)[family]]().to_dict()
    if "moe_intermediate_size" in found:  # such that a GPU runs all experts in one product
        found |= {"moe_intermediate_size": 16}
    return found


@functools.cache
def model(family: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    return random_model(config(family), dtype, "cpu")


def source(family: str, tokens: int = 5) -> int | None:
    return tokens if family == "t5" else None


def owned(cache: Cache) -> int:
    """Bytes of every storage that can be reached from a cache and is not its model's, each once."""
    model = cache.model
    assert model is not None
    skipped = {id(model)} | {id(x) for x in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [cache]
    while todo:
        one = todo.pop()
        if id(one) in seen or id(one) in skipped:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr() or id(one)] = storage.nbytes()
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, list | tuple):
            todo += one
        elif type(one).__module__.startswith(("lamina.", "tests.")):
            todo += vars(one).values()
    return sum(found.values())
