"""Banned and biased ids and sequences: always, at the start, before a minimum length, or as repetitions.

Sets of ids become masks [V] and lists of sequences become tables. Both are made once on the device of the scores
(`mask_of`, `sequence_bias`, `bad_words`), so nothing is copied to it at every token.
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
from lamina.sampling.kinds import Custom, TokenIds, Whole, read_biases, read_id_sequences
from lamina.sampling.setting import ProcessorContext, Setting, Stage

COMPARED_AT_ONCE = 1 << 24
"""Up to this many tokens of n-grams are compared in one operation; more are compared column by column."""


def mask_of(ids: Iterable[int], vocab: int, device: torch.device | str, name: str) -> Tensor:
    """A set of ids as a mask [V] bool; `name` is the setting that the error names.

    The same ids give the same tensor, so processors of equal settings compare equal and share a captured step.

    >>> mask_of([0, 2], 4, "cpu", "eos_token_id")
    tensor([ True, False,  True, False])
    >>> mask_of([2, 0], 4, "cpu", "eos_token_id") is mask_of([0, 2], 4, "cpu", "suppress_tokens")
    True
    """
    return _mask(frozenset(check_id(id, vocab, name) for id in ids), vocab, torch.device(device))


@lru_cache(maxsize=256)
def _mask(ids: frozenset[int], vocab: int, device: torch.device) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(ids)] = True
    return mask.to(device)


def check_id(id: int, vocab: int, name: str) -> int:
    """The id, if it is in the vocabulary; an error otherwise."""
    if not 0 <= id < vocab:
        raise InputError(f"{name} has the id {id}; this model's ids are 0 to {vocab - 1}")
    return int(id)


@dataclass(frozen=True)
class Suppress:
    """Bans these ids."""

    ids: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "suppress_tokens"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where(self.ids, -torch.inf, scores)


@dataclass(frozen=True)
class SuppressAtBegin:
    """Bans these ids as the first new token of a row; as the second if the first is forced (`after_forced` and a prompt
    of at most one token)."""

    ids: Tensor  # [V] bool
    after_forced: bool = False
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "begin_suppress_tokens"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        begin = history.prompts + (history.prompts <= 1) if self.after_forced else history.prompts
        return torch.where((history.lengths == begin)[:, None] & self.ids, -torch.inf, scores)


@dataclass(frozen=True)
class MinLength:
    """Bans end tokens until a row has `least` tokens, its prompt included."""

    least: int
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "some"
    setting: ClassVar[str] = "min_length"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return torch.where((history.lengths < self.least)[:, None] & self.ends, -torch.inf, scores)


@dataclass(frozen=True)
class MinNewTokens:
    """Bans end tokens until a row has `least` new tokens."""

    least: int
    ends: Tensor  # [V] bool
    needs_tokens: ClassVar[bool] = False
    excludes: ClassVar[str] = "some"
    setting: ClassVar[str] = "min_new_tokens"

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        early = history.lengths - history.prompts < self.least
        return torch.where(early[:, None] & self.ends, -torch.inf, scores)


@dataclass(frozen=True)
class NoRepeatNgram:
    """Bans ids that would complete an n-gram which the row contains already, in its prompt or since."""

    n: int
    needs_tokens: ClassVar[bool] = True
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "no_repeat_ngram_size"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(f"no_repeat_ngram_size must be at least 1, not {self.n}; as a setting, 0 turns it off")

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return ban_ngrams(scores, history.ids, self.n, history)


@dataclass(frozen=True)
class NoSourceNgram:
    """Bans ids that would complete an n-gram of the source: the encoder's input; without an encoder, the prompt."""

    n: int
    needs_tokens: ClassVar[bool] = True
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "encoder_no_repeat_ngram_size"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InputError(
                f"encoder_no_repeat_ngram_size must be at least 1, not {self.n}; as a setting, 0 turns it off"
            )

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return ban_ngrams(scores, history.source_ids, self.n, history)


def ban_ngrams(scores: Tensor, ids: Tensor, n: int, history: History) -> Tensor:
    """Bans the ids that follow, anywhere in ids [B, S], the last n - 1 tokens of each row. -1 matches nothing. Returns
    at once if n > S."""
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
    """Which windows [B, W, n] begin with tail [B, n - 1], in O(B · W) memory: compares the columns from last to first
    and stops when no window is left. That check, every 64 columns, makes the host wait for the device."""
    found = windows[..., -1] >= 0
    for at in reversed(range(tail.shape[1])):
        found &= (windows[..., at] == tail[:, at, None]) & (tail[:, at, None] >= 0)
        if at % 64 == 0 and not bool(found.any()):
            break
    return found


@dataclass(frozen=True)
class SequenceBias:
    """Adds a bias to the score of an id that would complete a sequence; for a sequence of one id, always. Made by
    `sequence_bias`."""

    prefixes: Tensor  # [N, P] each sequence without its last id, padded with -1 on the left
    lasts: Tensor  # [N] the last id of each sequence
    biases: Tensor  # [N] float32
    excludes: ClassVar[str] = "none"

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
    """Bans the id that would complete a sequence. Made by `bad_words`."""

    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "bad_words_ids"


def sequence_bias(given: Any, vocab: int, device: torch.device | str) -> SequenceBias:
    """The processor for {(id, …): bias} or [[[id, …], bias], …].

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
    """The processor for lists of ids, without those that are a single end token; None if no list is left."""
    table = {tuple(word): -torch.inf for word in words if not (len(word) == 1 and word[0] in ends)}
    return BadWords(*_table(table, vocab, device, "bad_words_ids")) if table else None


def _table(
    table: Mapping[tuple[int, ...], float], vocab: int, device: torch.device | str, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not table or () in table:
        raise InputError(f"{name} must name at least one sequence, each of at least one id, not {list(table)}")
    for ids in table:
        for id in ids:
            check_id(id, vocab, name)
    return _tensors(tuple(table.items()), torch.device(device))


@lru_cache(maxsize=256)  # equal tables are the same tensors, as in `mask_of`
def _tensors(pairs: tuple[tuple[tuple[int, ...], float], ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The prefixes, last ids and biases of a `SequenceBias`."""
    order = sorted(pairs, key=lambda pair: len(pair[0]) > 1)  # single ids first
    width = max(len(ids) for ids, _ in order) - 1
    prefixes = [[-1] * (width + 1 - len(ids)) + list(ids[:-1]) for ids, _ in order]
    return (
        torch.tensor(prefixes, dtype=torch.int64, device=device).view(len(order), width),
        torch.tensor([ids[-1] for ids, _ in order], device=device),
        torch.tensor([bias for _, bias in order], dtype=torch.float32, device=device),
    )


def _ends(context: ProcessorContext) -> Tensor:
    return mask_of(context.end_ids, context.vocab, context.device, "eos_token_id")


def _min_length(least: int, context: ProcessorContext) -> MinLength | None:
    return MinLength(least, _ends(context)) if least and context.end_ids else None


def _min_new_tokens(least: int, context: ProcessorContext) -> MinNewTokens | None:
    return MinNewTokens(least, _ends(context)) if least and context.end_ids else None


def _sequence_bias(given: Any, context: ProcessorContext) -> SequenceBias | None:
    return sequence_bias(given, context.vocab, context.device) if given else None


def _bad_words(words: Sequence[Sequence[int]], context: ProcessorContext) -> BadWords | None:
    return bad_words(words, context.end_ids, context.vocab, context.device)


def _suppress(ids: Iterable[int], context: ProcessorContext) -> Suppress | None:
    return Suppress(mask_of(ids, context.vocab, context.device, "suppress_tokens")) if ids else None


def _suppress_at_begin(ids: Iterable[int], context: ProcessorContext) -> SuppressAtBegin | None:
    if not ids:
        return None
    mask = mask_of(ids, context.vocab, context.device, "begin_suppress_tokens")
    return SuppressAtBegin(mask, after_forced=context.settings.forced_bos_token_id is not None)


SETTINGS = (
    Setting(
        "sequence_bias",
        Custom("Mapping[Ids, float]", "Mapping[tuple[int, ...], float] | Sequence[Sequence[Any]]", read_biases),
        default=None, stage=Stage.BIAS, processor=_sequence_bias,
        meaning="{(id, …): bias}: added to the score of the id that would complete the sequence.",
    ),
    Setting(
        "no_repeat_ngram_size", Whole(0), default=0, stage=Stage.BAN,
        meaning="No run of this many tokens occurs twice in a row.",
        processor=lambda n, context: NoRepeatNgram(n),
    ),
    Setting(
        "encoder_no_repeat_ngram_size", Whole(0), default=0, stage=Stage.BAN,
        meaning="No run of this many tokens of the source (without an encoder, the prompt) occurs again.",
        processor=lambda n, context: NoSourceNgram(n),
    ),
    Setting(
        "min_length", Whole(0), default=0, group="length", instead_of="min_new_tokens", stage=Stage.BAN,
        meaning="A row may end by eos from this many tokens on, prompt and new.",
        processor=_min_length,
    ),
    Setting(
        "min_new_tokens", Whole(0), default=None, group="length", stage=Stage.BAN,
        meaning="A row may end by eos from this many new tokens on.",
        processor=_min_new_tokens,
    ),
    Setting(
        "bad_words_ids", Custom("tuple[Ids, ...]", "Sequence[Sequence[int]]", read_id_sequences),
        default=None, stage=Stage.BAN_WORDS, processor=_bad_words,
        meaning="Sequences of ids that never occur.",
    ),
    Setting(
        "suppress_tokens", TokenIds(), default=None, stage=Stage.SUPPRESS, processor=_suppress,
        meaning="Ids that are never chosen.",
    ),
    Setting(
        "begin_suppress_tokens", TokenIds(), default=None, stage=Stage.SUPPRESS, processor=_suppress_at_begin,
        meaning="Ids that are not chosen as the first new token.",
    ),
)  # fmt: skip
