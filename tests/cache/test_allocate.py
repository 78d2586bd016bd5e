"""Memory of a cache: allocated one tensor after the other, zeroed together."""

from __future__ import annotations

import pytest
import torch

from lamina.cache.clock import allocate, zeroed_together


def test_tensors_are_zeroed_together_at_the_end_also_after_an_error() -> None:
    kept: list[torch.Tensor] = []
    with pytest.raises(KeyError), torch.inference_mode(), zeroed_together():
        for shape in ((2, 3), (4, 0)):
            kept.append(allocate(shape, torch.float32, torch.device("cpu"), later=True))
            kept[-1].fill_(7)  # what is written before the end is lost
        kept.append(allocate((2,), torch.float32, torch.device("cpu"), 3))
        raise KeyError
    assert [one.flatten().tolist() for one in kept] == [[0.0] * 6, [], [3.0, 3.0]]
    kept[0].add_(1)  # outside of inference mode, too
