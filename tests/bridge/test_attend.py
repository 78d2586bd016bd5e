"""`lamina.bridge.attend`: attention over codes, and over memory of the host, without a dense copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lamina import bridge
from tests.bridge.models import CONFIGS, ids, model

KEPT: dict[str, dict[str, Any]] = {"int8": {"codec": "int8"}, "host": {"residence": "host"}}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_the_dense_path(name: str, kept: str) -> None:
    attending = bridge.attend(copy.deepcopy(model(name)))
    assert attending.config._attn_implementation == "lamina"
    given, mask = ids()
    made = [
        one.generate(
            given, attention_mask=mask, past_key_values=bridge.Cache(one, **KEPT[kept]), do_sample=False,
            max_new_tokens=14,
        )
        for one in (model(name), attending)
    ]  # fmt: skip
    assert torch.equal(*made)
