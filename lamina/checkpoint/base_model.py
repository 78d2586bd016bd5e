"""A checkpoint that was saved without its head, whose tensor names lack the prefix that they have beside one.

transformer.h.0.ln_1.weight      GPT-2 with its head, as transformers saves it
h.0.ln_1.weight                  GPT-2 as published: the base model, saved alone (`AutoModel`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from lamina.checkpoint.names import Names, stored_names
from lamina.checkpoint.source import Checkpoint

if TYPE_CHECKING:
    from lamina.checkpoint.packing import PackedTensors
    from lamina.checkpoint.quantized.code_order import Room
    from lamina.checkpoint.tokenizer import Tokenizer


class BaseModelCheckpoint(Checkpoint):
    """A view of a checkpoint with a prefix before its names.

    outside   first parts of names that stay as they are: those of the head
    """

    def __init__(self, whole: Checkpoint, prefix: str, outside: Set[str]) -> None:
        self.whole, self.path = whole, whole.path
        self.config, self.generation_config = whole.config, whole.generation_config
        self._stored = {name if first(name) in outside else f"{prefix}.{name}": name for name in whole.names}

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.whole.eos_ids

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole.shape(self._stored.get(name, name))

    def dtype(self, name: str) -> torch.dtype | None:
        return self.whole.dtype(self._stored.get(name, name))

    def read(self, name: str) -> torch.Tensor:
        return self.whole.read(self._stored.get(name, name))

    def packed(self, name: str, device: torch.device, room: Room | None = None) -> PackedTensors | None:
        return self.whole.packed(self._stored.get(name, name), device, room)

    def tokenizer(self) -> Tokenizer | None:
        return self.whole.tokenizer()


def with_prefix(source: Checkpoint, names: Names) -> Checkpoint:
    """The checkpoint under the names of a family's table: as it is, or with the prefix that most of them have."""
    listed = stored_names(names)
    counts = Counter(map(first, listed))
    if not counts:
        return source
    prefix, most = counts.most_common(1)[0]
    prefixes = {part for part, count in counts.items() if count == most}  # several for a family with several layouts
    inside = {first(name.removeprefix(f"{prefix}.")) for name in listed if first(name) == prefix}
    found = set(map(first, source.names))
    if found & prefixes or not found & inside:
        return source
    return BaseModelCheckpoint(source, prefix, counts.keys() - prefixes)


def first(name: str) -> str:
    """The part of a tensor's name before the first dot."""
    return name.partition(".")[0]
