"""`every_module` and `addresses`: what PyTorch's own walks over a model find, without names."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from lamina.runtime.graphs import addresses
from lamina.weights.packed import every_module


def test_modules_and_weights_are_those_that_pytorch_finds_also_below_compiled_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        scripted = torch.jit.script(nn.Linear(2, 3))
        traced = torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Identity()), scripted, traced)
    assert set(every_module(model)) == set(model.modules())
    assert sorted(addresses(model)) == sorted(parameter.data_ptr() for parameter in model.parameters())
