"""Ids and sequences of ids that are banned or biased: always, at the beginning, before a length, or as repetitions.

Sets of ids are masks [V] and lists of sequences are tables, made once on the device of the scores (`mask_of`,
`sequence_bias`, `bad_words`), so that nothing is copied there at every token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.history import History

COMPARED_AT_ONCE = 1 << 24
"""Tokens of n-grams that are compared in one piece; more are compared token by token."""


def mask_of(ids: Iterable[int], vocab: int, device: torch.device | str, name: str) -> Tensor:
    """A set of ids as a mask. [V] bool; `name` is what the caller calls them.

    The same ids give the same tensor, so that processors made of equal settings are equal and share a captured step.

    >>> mask_of([0, 2], 4, "cpu", "eos_token_id")
    tensor([ True, False,  True, False])
    >>> mask_of([2, 0], 4, "cpu", "eos_token_id") is mask_of([0, 2], 4, "cpu", "suppress_tokens")
    True
    """
    return _mask(frozenset(inside(id, vocab, name) for id in ids), vocab, torch.device(device))


@lru_cache(maxsize=256)
def _mask(ids: frozenset[int], vocab: int, device: torch.device) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(ids)] = True
    return mask.to(device)


def inside(id: int, vocab: int, name: str) -> int:
    """The id, if the vocabulary has it."""
    if not 0 <= id < vocab:
        raise InputError(f"{name} has the id {id}; this model's ids are 0 to {vocab - 1}")
    return int(id)


@dataclass(frozen=True)
class Suppress:
    """These ids never."""

    ids: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(self.ids, -torch.inf, scores)


@dataclass(frozen=True)
class SuppressAtBegin:
    """These ids not as a row's first new token; where a forced first token comes before it (`after_forced`) and the
    prompt is no longer than one token, not as its second."""

    ids: Tensor  # [V] bool
    after_forced: bool = False
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        begin = history.prompts + (history.prompts <= 1) if self.after_forced else history.prompts
        return torch.where((history.lengths == begin)[:, None] & self.ids, -torch.inf, scores)


@dataclass(frozen=True)
class MinLength:
    """No end token before a row holds `least` tokens, its prompt included."""

    least: int
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where((history.lengths < self.least)[:, None] & self.ends, -torch.inf, scores)


@dataclass(frozen=True)
class MinNewTokens:
    """No end token before `least` new tokens."""

    least: int
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        early = history.lengths - history.prompts < self.least
        return torch.where(early[:, None] & self.ends, -torch.inf, scores)


@dataclass(frozen=True)
class NoRepeatNgram:
    """No id that would complete an n-gram which a row holds already, in its prompt or since."""

    n: int
    needs_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(f"no_repeat_ngram_size must be at least 1, not {self.n}; 0 leaves it out of the settings")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return without_ngrams(scores, history.ids, self.n, history)


@dataclass(frozen=True)
class NoSourceNgram:
    """No id that would complete an n-gram of the source, the encoder's or without an encoder the prompt's."""

    n: int
    needs_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(
                f"encoder_no_repeat_ngram_size must be at least 1, not {self.n}; 0 leaves it out of the settings"
            )

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return without_ngrams(scores, history.source_ids, self.n, history)


def without_ngrams(scores: Tensor, ids: Tensor, n: int, history: History) -> Tensor:
    """Bans what followed the last n - 1 tokens of each row anywhere in ids [B, S]; -1 in either equals nothing. An n
    above S costs nothing."""
    if ids.shape[1] < n:
        return scores
    tail = history.tail(n - 1)  # [B, n - 1]
    windows = ids.unfold(1, n, 1)  # [B, S - n + 1, n], a view
    if windows.numel() <= COMPARED_AT_ONCE:
        found = (windows[..., :-1] == tail[:, None]).all(dim=-1) & (windows >= 0).all(dim=-1)
    else:
        found = _found_by_columns(windows, tail)
    vocab = scores.shape[-1]
    spare = torch.where(found & (windows[..., -1] < vocab), windows[..., -1], vocab)
    banned = torch.zeros(len(scores), vocab + 1, dtype=torch.bool, device=scores.device).scatter_(1, spare, True)
    return torch.where(banned[:, :vocab], -torch.inf, scores)


def _found_by_columns(windows: Tensor, tail: Tensor) -> Tensor:
    """Which windows [B, W, n] begin with tail [B, n - 1], in memory of B · W: from the last token back, until none is
    left. The host looks now and then, so the device waits for it."""
    found = windows[..., -1] >= 0
    for at in reversed(range(tail.shape[1])):
        found &= (windows[..., at] == tail[:, at, None]) & (tail[:, at, None] >= 0)
        if at % 64 == 0 and not bool(found.any()):
            break
    return found


@dataclass(frozen=True)
class SequenceBias:
    """Adds a bias to the id that would complete a sequence; a sequence of one id has it always. Made by
    `sequence_bias`."""

    prefixes: Tensor  # [N, P] all but the last id of each sequence, -1 in front of short ones
    lasts: Tensor  # [N]
    biases: Tensor  # [N] float32

    @property
    def needs_tokens(self) -> bool:
        return self.prefixes.shape[1] > 0

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        added = self.biases.expand(len(scores), -1)
        if self.needs_tokens:
            tail = history.tail(self.prefixes.shape[1])[:, None]  # [B, 1, P]
            complete = ((self.prefixes == tail) | (self.prefixes < 0)).all(dim=-1)
            added = torch.where(complete, added, 0)
        return scores + torch.zeros_like(scores).scatter_add_(1, self.lasts.expand(len(scores), -1), added)


class BadWords(SequenceBias):
    """Sequences that never become whole. Made by `bad_words`."""


def sequence_bias(given: Any, vocab: int, device: torch.device | str) -> SequenceBias:
    """From {(id, …): bias} or [[[id, …], bias], …].

    >>> bias = sequence_bias({(3,): -1.0, (1, 2): 5.0}, 4, "cpu")
    >>> history = History(torch.tensor([1, 1]), torch.tensor([1, 1]), torch.tensor([[1], [2]]), None)
    >>> bias(torch.zeros(2, 4), history)
    tensor([[ 0.,  0.,  5., -1.],
            [ 0.,  0.,  0., -1.]])
    """
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        table = {tuple(ids): float(bias) for ids, bias in pairs}
    except (TypeError, ValueError) as error:
        raise InputError(
            f"sequence_bias must map id sequences to numbers, as {{(3, 5): -2.0}} or [[[3, 5], -2.0]], not {given!r}"
        ) from error
    return SequenceBias(*_table(table, vocab, device, "sequence_bias"))


def bad_words(
    words: Sequence[Sequence[int]], ends: Collection[int], vocab: int, device: torch.device | str
) -> BadWords | None:
    """From lists of ids; one that is nothing but an end token is left out. None when none is left."""
    table = {tuple(word): -torch.inf for word in words if not (len(word) == 1 and word[0] in ends)}
    return BadWords(*_table(table, vocab, device, "bad_words_ids")) if table else None


def _table(
    table: Mapping[tuple[int, ...], float], vocab: int, device: torch.device | str, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not table or () in table:
        raise InputError(f"{name} must name at least one sequence, each of at least one id, not {list(table)}")
    for ids in table:
        for id in ids:
            inside(id, vocab, name)
    return _tensors(tuple(table.items()), torch.device(device))


@lru_cache(maxsize=256)  # as in `mask_of`
def _tensors(pairs: tuple[tuple[tuple[int, ...], float], ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The prefixes, last ids and biases of a `SequenceBias`."""
    order = sorted(pairs, key=lambda pair: len(pair[0]) > 1)  # single ids first, the rest as given
    width = max(len(ids) for ids, _ in order) - 1
    prefixes = [[-1] * (width + 1 - len(ids)) + list(ids[:-1]) for ids, _ in order]
    return (
        torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(order), width),
        torch.tensor([ids[-1] for ids, _ in order], device=device),
        torch.tensor([bias for _, bias in order], dtype=torch.float32, device=device),
    )
