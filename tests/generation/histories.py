"""Random ragged rows for tests of processors, settings that ask for nothing, and transformers' classes row by row."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lamina.generation.settings import declared  # noqa: F401  registers the settings
from lamina.sampling.history import History
from lamina.sampling.setting import registered

VOCAB = 23


def asked(**given: Any) -> SimpleNamespace:
    """Settings in which only what is given is set."""
    names = [one.name for one in registered()]
    assert not set(given) - set(names), set(given) - set(names)
    return SimpleNamespace(**(dict.fromkeys(names) | given))


def history_of(prompts: list[list[int]], new: list[list[int]], garbage: int = -1) -> History:
    """Rows of these tokens; slots past a row's end hold `garbage`."""
    rows = [[*prompt, *made] for prompt, made in zip(prompts, new, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [garbage] * (width - len(row)) for row in rows])
    return History(torch.tensor([len(row) for row in rows]), torch.tensor([len(p) for p in prompts]), tokens, None)


def random_history(seed: int, rows: int = 6, longest: int = 9, vocab: int = VOCAB) -> History:
    """Ragged rows over few ids, so that ids and short sequences repeat; some rows have no new token yet."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> list[int]:
        return torch.randint(0, vocab, (n,), generator=generator).tolist()

    sizes = torch.randint(0, longest + 1, (2, rows), generator=generator).tolist()
    sizes[0][0], sizes[1][0] = 1, 0
    return history_of([ids(max(n, 1)) for n in sizes[0]], [ids(n) for n in sizes[1]], garbage=seed % 5 - 1)


def random_scores(seed: int, rows: int = 6, vocab: int = VOCAB, banned: bool = True) -> Tensor:
    """Scores on both sides of zero; some are -inf when `banned`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    if banned:
        scores[torch.rand(rows, vocab, generator=generator) < 0.1] = -torch.inf
        scores[:, seed % vocab] = 1.0
    return scores


def row_by_row(theirs: Callable[[int, Tensor], Any], scores: Tensor, history: History) -> Tensor:
    """What transformers gives for each row alone, unpadded; theirs(length of the prompt, prompt [1, P]) makes its
    processor."""
    assert history.tokens is not None
    out = []
    for r, (length, prompt) in enumerate(zip(history.lengths.tolist(), history.prompts.tolist(), strict=True)):
        ids = history.tokens[r : r + 1, :length]
        out.append(theirs(prompt, ids[:, :prompt])(ids, scores[r : r + 1].clone()))
    return torch.cat(out)
