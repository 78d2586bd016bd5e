"""What a call of generate returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import InputError


@dataclass
class Timing:
    """Seconds and tokens of the two phases."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows a second, the prompt's time apart."""
        return self.new_tokens / self.new_seconds if self.new_seconds else 0.0


@dataclass
class Result:
    """tokens: the new ids of each row; cache: holds every row's prompt and new tokens, ready to be continued."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    reasons: list[str]
    """Why each row ended: "eos" or "length"."""
    cache: Cache
    tokenizer: Tokenizer | None = None
    pad_id: int = 0
    timing: Timing = field(default_factory=Timing)

    @property
    def text(self) -> list[str]:
        """The new text of each row."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: read result.tokens instead")
        return [self.tokenizer.decode(row) for row in self.tokens]

    @property
    def sequences(self) -> Tensor:
        """Prompt and new tokens of each row, padded on the right. [B, longest]"""
        rows = [torch.tensor(prompt + new) for prompt, new in zip(self.prompts, self.tokens, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
