"""`use_cache=False`: every pass runs whole sequences. Slow, and the definition that everything else is checked by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cross import Source
from lamina.generation.history import History
from lamina.generation.prompt import from_rows
from lamina.generation.run import Chooser, Run
from lamina.generation.settings import Settings
from lamina.generation.stopping import Stopping

if TYPE_CHECKING:
    from lamina.model import Model


@dataclass
class Uncached(Run):
    """A run over token lists. texts: prompt and new tokens of each row."""

    texts: list[list[int]] = field(default_factory=list)
    encoded: Source | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        rows: Sequence[Sequence[int]],
        encoded: Source | None,
        chooser: Chooser,
        stopping: Stopping,
        numbers: list[int],
        settings: Settings,
    ) -> Uncached:
        nothing: Any = None
        run = cls(model, nothing, nothing, chooser, stopping, [len(row) for row in rows], numbers, settings)
        run.texts, run.encoded = [list(row) for row in rows], encoded
        run.logits = run._pass(range(len(rows)))
        return run

    def history(self, rows: Sequence[int] | None = None) -> History:
        some = list(range(self.rows)) if rows is None else list(rows)
        known = from_rows([self.texts[row] for row in some])
        device = self.model.device
        assert known.ids is not None
        lengths, prompts = (
            torch.tensor(numbers, device=device) for numbers in (known.counts, [self.prompts[row] for row in some])
        )
        sources = None if self.source is None else self.source[some]
        return History(lengths, prompts, known.ids.to(device), None, sources, None, [self.numbers[r] for r in some])

    def feed(self, ids: Tensor, rows: Sequence[int]) -> Tensor:
        for row, token in zip(rows, ids.tolist(), strict=True):
            self.texts[row].append(token)
        return self._pass(rows)

    def _pass(self, rows: Sequence[int]) -> Tensor:
        some = from_rows([self.texts[row] for row in rows])
        source = None if self.encoded is None else self.encoded.select(rows)
        logits = self.model(some.ids, counts=some.counts, logits="last", source=source)
        assert logits is not None
        return logits
