"""`text_part`: the text model of a multimodal release (gemma3, llama4, mistral3, qwen3_5 …) as a family of its own.

It is built from `text_config` and loads the tensors of the text model, however their names are spelled
(`lamina/checkpoint/text_part.py`); other towers are skipped.
"""

from __future__ import annotations

from typing import Self

from lamina.checkpoint.source import Checkpoint
from lamina.checkpoint.text_part import TextPartCheckpoint
from lamina.config import Config
from lamina.model import Model


class TextPart(Model):
    """What `text_part` adds to a family."""

    @classmethod
    def build(cls, config: Config) -> Self:
        config.ignore(*config.values)  # the rest is about other towers
        config.ignore(*(f"{name}.*" for name in config.values if name != "text_config"))
        text = config.part("text_config")
        tied = config.get("tie_word_embeddings")  # transformers ties by the outer configuration
        return super().build(text if tied is None else text.with_values(tie_word_embeddings=tied))

    @classmethod
    def part_of(cls, source: Checkpoint) -> Checkpoint:
        return TextPartCheckpoint(source)


PARTS: dict[type[Model], type[Model]] = {}


def text_part(cls: type[Model]) -> type[Model]:
    """The family for the text model inside a larger checkpoint.

    >>> from lamina.models.llama import Llama
    >>> text_part(Llama).__name__
    'LlamaTextPart'
    """
    if cls not in PARTS:
        about = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        PARTS[cls] = type(f"{cls.__name__}TextPart", (TextPart, cls), about)
    return PARTS[cls]
