"""The weights of a model, packed or not: each once, under the path of the parameter that it is or replaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from lamina.weights.packed import Packed, PackedWeight

Weight = nn.Parameter | Packed


def own_weights(module: nn.Module) -> dict[str, Weight]:
    """The weights of a module without those of its children, in the order in which a plain model has its parameters."""
    if isinstance(module, Packed):
        return {}
    found: dict[str, Weight] = {name: one for name, one in module._parameters.items() if one is not None}
    packed = {name: one for name, one in module._modules.items() if isinstance(one, Packed)}
    if not packed:
        return found
    first = [name for name in getattr(module, "packable", ()) if name in found or name in packed]
    return {name: (found | packed)[name] for name in dict.fromkeys((*first, *packed, *found))}


def named_weights(module: nn.Module) -> Iterator[tuple[str, Weight]]:
    """(path, weight), each weight once.

    >>> [name for name, _ in named_weights(nn.Linear(2, 3))]
    ['weight', 'bias']
    """
    seen: set[int] = set()
    for path, one in inside(module):
        for name, weight in own_weights(one).items():
            if id(weight) not in seen:
                seen.add(id(weight))
                yield f"{path}.{name}" if path else name, weight


def inside(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of a module and all below it, without packed weights and their parts."""
    if not isinstance(module, Packed):
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from inside(child, f"{path}.{name}" if path else name)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all weights, as they are stored."""
    return sum(weight.nbytes for _, weight in named_weights(module))


def packed_formats(module: nn.Module) -> dict[str, int]:
    """Format -> number of tensors stored in it; empty for a model whose weights are plain."""
    weights = (one for one in module.modules() if isinstance(one, PackedWeight))
    return dict(Counter(str(one.format) for one in weights))
