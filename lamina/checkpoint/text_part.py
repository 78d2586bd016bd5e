"""The text model of a multimodal checkpoint, under the names it has when it is released alone.

Releases spell the same tensors in several ways:

    model.layers.0.mlp.up_proj                        the text model alone
    language_model.model.layers.0.mlp.up_proj         gemma3, llama4, mistral3 as published; the head beside it:
    language_model.lm_head
    model.language_model.layers.0.mlp.up_proj         gemma3n, gemma4, qwen3_5, and what transformers 5 saves; the head
    lm_head                                           at the top

Tensors with none of these prefixes belong to other towers (vision, audio, projectors) and are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

import torch

from lamina.checkpoint.source import Checkpoint

if TYPE_CHECKING:
    from lamina.checkpoint.packing import PackedTensors
    from lamina.checkpoint.quantized.code_order import Room
    from lamina.checkpoint.tokenizer import Tokenizer


PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""Prefix in the checkpoint -> prefix in the text model alone."""


class TextPartCheckpoint(Checkpoint):
    """A view of a checkpoint that shows its text model alone. Without any prefix it shows all tensors as they are."""

    def __init__(self, whole: Checkpoint) -> None:
        self.whole, self.path = whole, whole.path
        self.config, self.generation_config = whole.config, whole.generation_config
        shown = {own: name for name in whole.names if (own := own_name(name)) is not None}
        alone = all(name.startswith("lm_head.") for name in shown.values())
        self._stored = {name: name for name in whole.names} if alone else shown  # name in the text model -> stored name

    @property
    def names(self) -> Set[str]:
        return self._stored.keys()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.whole.eos_ids

    @property
    def skipped(self) -> list[str]:
        """Names of tensors of other towers."""
        return sorted(set(self.whole.names) - set(self._stored.values()))

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


def own_name(name: str) -> str | None:
    """The name of a stored tensor in the text model alone; None if it belongs to another tower.

    >>> own_name("model.language_model.norm.weight"), own_name("language_model.lm_head.weight")
    ('model.norm.weight', 'lm_head.weight')
    >>> own_name("vision_tower.conv.weight")
    """
    return next((own + name.removeprefix(theirs) for theirs, own in PREFIXES.items() if name.startswith(theirs)), None)


def is_text_part(name: str) -> bool:
    """True for a tensor name that only multimodal releases have, and there in the text model.

    >>> is_text_part("model.language_model.norm.weight"), is_text_part("lm_head.weight")
    (True, False)
    """
    return name.startswith(("language_model.", "model.language_model."))


def towers(names: Iterable[str]) -> dict[str, list[str]]:
    """Tensor names by tower: the first part of the name, or the first two if that is `model`.

    >>> towers(["model.visual.a", "model.visual.b", "projector.c"])
    {'model.visual': ['model.visual.a', 'model.visual.b'], 'projector': ['projector.c']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        found.setdefault(".".join(parts[: 2 if parts[0] == "model" else 1]), []).append(name)
    return found
