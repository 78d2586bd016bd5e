"""A model of some configuration with random weights, made on its device in its dtype: no number passes through the CPU.

Every matrix is scaled by its inputs, so that activations stay near one through any number of layers; what is not a
matrix gets the values training starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lamina.checkpoint.huge_pages import collapse
from lamina.checkpoint.loader import finish_buffers, own_dtype, owner, put, room, tensors_of
from lamina.config import Config
from lamina.loading import stored_on_meta
from lamina.model import Model
from lamina.models import family_of
from lamina.nn import GatedRMSNorm, LayerNorm, RMSNorm
from lamina.runtime.prebuild import start_build
from lamina.weights.quantize import PLAIN, quantize_weight


@torch.no_grad()
def random_model(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    weights: str | None = None,
) -> Model:
    """
    weights   "int8", "int4" or "fp8": matrices are quantized one by one as they are made; None: plain

    >>> from lamina.checkpoint.shapes import SMOLLM2_135M
    >>> small = dict(SMOLLM2_135M.config, num_hidden_layers=1, vocab_size=100)
    >>> random_model(small, torch.float32, "cpu")(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """
    device = torch.device(device)
    building = start_build(partial(stored_on_meta, config, dtype, None, weights or PLAIN), dtype, device)
    with torch.device("meta"):
        model = family_of(read := Config(config)).build(read)
    noise = torch.Generator(device).manual_seed(seed)
    for paths, like in tensors_of(model):
        if not isinstance(like, nn.Parameter):
            continue
        values = room(like.shape, own_dtype(model, paths, like, dtype), device)
        module, name = owner(model, paths[0])
        start(module, name, values, noise)
        put(model, paths, like, values)
        if weights is not None:
            owners = [owner(model, path) for path in paths]
            quantize_weight(model, owners, weights)
    finish_buffers(model, device)
    collapse(model.parameters())
    if building is not None:
        building.register(model)
    return model.eval()


def start(module: nn.Module, name: str, values: Tensor, noise: torch.Generator) -> None:
    """Fills one parameter of a module."""
    if isinstance(module, RMSNorm | GatedRMSNorm | LayerNorm):
        values.fill_(0 if getattr(module, "plus_one", False) or name == "bias" else 1)
    elif name == "A":  # a decay: how fast a state forgets
        values.uniform_(-16, -1, generator=noise)
    elif name == "rate" or (name == "w" and values.dim() == 1):  # the same of RG-LRU and RWKV
        values.uniform_(-4, -0.1, generator=noise)
    elif name == "dt_bias":  # steps of 0.001 to 0.1 after softplus
        values.uniform_(-7, -2.3, generator=noise)
    elif name == "D":
        values.fill_(1)
    else:
        fan_in = values.shape[-1] if values.dim() > 1 else 2500
        values.normal_(0, fan_in**-0.5, generator=noise)
