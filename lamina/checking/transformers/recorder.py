"""Finds the decoder layers of a transformers model, and records what each makes of every token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lamina.errors import InputError


def decoder_layers(model: Any, run: Callable[[], object]) -> list[nn.Module]:
    """The layers of the decoder: of the outermost module lists that `run` calls, the one with most parameters.

    The lists of an encoder or of a vision tower are not called, since rows are text and sources are given.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    outermost = {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists if other != name)
    }
    called: set[nn.Module] = set()
    hooks = [
        layer.register_forward_pre_hook(lambda layer, _: called.add(layer))
        for module in outermost.values()
        for layer in module
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found = [[*module] for module in outermost.values() if called & {*module}]
    if not found:
        raise InputError(f"{type(model).__name__} has no list of layers that its forward calls")
    return max(found, key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()))


@dataclass
class Pass:
    """What one forward of the model made: the input of the first layer and the output of each call of a layer, as
    [B · T, W]; None where a shape is not understood."""

    rows: int
    tokens: int
    input: Tensor | None = None
    outputs: list[Tensor | None] = field(default_factory=list)


class Recorder:
    """`with recorder.on(): …` records every forward of the model in `passes`."""

    def __init__(self, model: Any, layers: list[nn.Module], ids_name: str) -> None:
        self.model, self.layers, self.ids_name = model, layers, ids_name
        self.passes: list[Pass] = []
        self.running: int | None = None
        """The call of a layer that has begun and not ended: the one that raised."""

    @contextlib.contextmanager
    def on(self) -> Iterator[Recorder]:
        hooks = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for layer in dict.fromkeys(self.layers):
            hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._after))
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> list[Pass]:
        """The passes recorded since the last time."""
        taken, self.passes = self.passes, []
        return taken

    def _begin(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named.get(self.ids_name)
        ids = given[0] if ids is None and given else ids
        shape = (0, 0) if ids is None else ids.shape[:2]
        self.passes.append(Pass(*shape))
        self.running = None

    def _before(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        one = self.passes[-1]
        self.running = len(one.outputs)
        if not one.outputs:
            one.input = per_token(given or named, one)

    def _after(self, _: nn.Module, given: tuple[Any, ...], made: Any) -> None:
        self.passes[-1].outputs.append(per_token(made, self.passes[-1]))
        self.running = None


def per_token(made: Any, one: Pass) -> Tensor | None:
    """The first tensor in it with a vector for each token, as [B · T, W]."""
    rows, tokens = one.rows, one.tokens
    for tensor in tensors(made):
        if not tensor.is_floating_point():
            continue
        if tensor.ndim >= 3 and tensor.shape[:2] == (rows, tokens) and tensor.numel():
            return tensor.detach().reshape(rows * tokens, -1).clone()
        if tensor.ndim == 3 and tensor.shape[:2] == (tokens, rows):
            return tensor.detach().transpose(0, 1).reshape(rows * tokens, -1).clone()
        if tensor.ndim == 4 and tensor.shape[1:3] == (rows, tokens):  # several streams [streams, B, T, W]
            return tensor.detach().permute(1, 2, 0, 3).reshape(rows * tokens, -1)
        if tensor.ndim == 2 and tensor.shape[0] == rows * tokens:
            return tensor.detach().clone()
    return None


def tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, dict):
        for part in made.values():
            yield from tensors(part)
    elif isinstance(made, tuple | list):
        for part in made:
            yield from tensors(part)
