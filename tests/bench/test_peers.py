from __future__ import annotations

import pytest
import torch

from lamina.bench.peers import Dynamic, Static, peer_model
from lamina.bench.prefill import Prompts
from lamina.bench.random_model import random_model
from lamina.bench.subjects import Lamina
from tests.bench.small import NAMES, small

CPU = torch.device("cpu")
CONTEXT, STEPS = 20, 3  # past the small window


class Uncompiled(Static):
    def _compile(self) -> None:
        self.call = self.model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [Dynamic, Uncompiled])
def test_a_peer_decodes_from_a_filled_context_and_can_be_taken_back_to_it(name: str, kind: type[Dynamic]) -> None:
    peer = kind(peer_model(small(name), torch.float32, CPU))
    peer.open(2, CONTEXT, STEPS)
    for _ in range(2):
        peer.restart()
        peer.run(STEPS)
        if name not in (
            "mamba2-2.7b",
            "falcon-mamba-7b",
            "mamba-2.8b",
            "recurrentgemma-9b",
        ):  # whose caches do not count
            assert int(peer.cache.get_seq_length()) == CONTEXT + STEPS
    peer.close()
    peer.prefill(torch.ones(1, 9, dtype=torch.int64), Prompts.of("9"))
    assert len(peer.stream(torch.ones(1, 9, dtype=torch.int64), 3)) == 3


def test_a_peers_sliding_layers_keep_no_more_than_their_window() -> None:
    peer = Dynamic(peer_model(small("gemma-2-9b"), torch.float32, CPU))
    peer.open(1, CONTEXT, STEPS)
    assert [layer.keys.shape[-2] for layer in peer.cache.layers] == [7, CONTEXT]


def test_a_peer_needs_the_bytes_that_its_cache_takes() -> None:
    config = small("smollm2-135m")
    ours, theirs = Lamina(random_model(config, torch.float32, CPU)), Dynamic(peer_model(config, torch.float32, CPU))
    assert ours.weights == theirs.weights
    assert ours.needs(3, 50) == theirs.needs(3, 50) == 3 * 50 * 2 * 2 * 3 * 4 * 4
