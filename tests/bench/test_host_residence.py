"""The measure of caches on the host, small: both residences agree, and bytes over the link are those of the tokens."""

from __future__ import annotations

import pytest
import torch

from bench.host_residence import SMALL, agree, few_layers, link_bandwidth, measure
from lamina.bench import random_model
from lamina.loading import on_meta
from tests.bench.small import small


@pytest.mark.parametrize("name", ["gemma-2-9b", "falcon-h1-7b"])
def test_residences_agree_over_a_history(name: str) -> None:
    assert agree(random_model(small(name), torch.float32, "cpu"), 30) < 1e-5


@pytest.mark.parametrize("name", SMALL)
def test_models_for_the_check_can_be_made(name: str) -> None:
    assert len(on_meta(few_layers(name), torch.float32).blocks) == 4


def test_a_step_moves_the_tokens_there_are() -> None:
    model = random_model(small("llama-3.1-8b"), torch.float32, "cpu")
    token = model.new_cache(capacity=1).nbytes
    found = {where: measure(model, where, 64, 2) for where in ("host", "device")}
    assert found["host"].moved == (62.5 + 1) * token and found["device"].moved == 0  # of the two steps, in the middle
    assert link_bandwidth(model.device, 1024) > 0
