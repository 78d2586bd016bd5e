"""The processors that settings ask for, in the order in which they change a row's scores.

A processor is any callable (scores [B, V] float32, history) -> scores [B, V] (`history.py`). Ours are small frozen
dataclasses; those with `needs_tokens` False get by with lengths and counts, so they can be part of a captured step. The
order is that of transformers, with what it does not have put beside its kin:

    guidance (guidance.py, by the loop)
    sequence_bias                       bans.py
    encoder_repetition_penalty          penalties.py
    repetition_penalty                  penalties.py
    frequency_penalty, presence_penalty penalties.py
    no_repeat_ngram_size                bans.py
    encoder_no_repeat_ngram_size        bans.py
    min_length, min_new_tokens          bans.py
    prefix_allowed_tokens_fn            forcing.py
    grammar                             grammar.py
    bad_words_ids                       bans.py; after what may lift a ban (`forcing.only`)
    forced_bos_token_id                 forcing.py
    forced_eos_token_id                 forcing.py
    remove_invalid_values               here
    exponential_decay_length_penalty    penalties.py
    suppress_tokens                     bans.py
    begin_suppress_tokens               bans.py
    logits_processor                    the caller's own, in their order
    temperature, top_h, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff      filters.py, when sampling
    watermarking_config                 watermark.py
    renormalize_logits                  here

A processor of the caller's that has the type of one in the list takes its place there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling import bans, filters, forcing, grammar, penalties
from lamina.sampling.history import History, Processor
from lamina.sampling.watermark import watermark_of

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer


@dataclass(frozen=True)
class Facts:
    """What processors must know of a model: how many scores it gives, where they are, and its tokens' texts."""

    vocab: int
    device: torch.device | str = "cpu"
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True)
class RemoveInvalid:
    """NaN becomes 0, and infinite scores the largest and smallest that there are."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scores.nan_to_num(nan=0.0)


@dataclass(frozen=True)
class Renormalize:
    """Scores become log-probabilities."""

    needs_tokens: ClassVar[bool] = False

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        return scores.log_softmax(dim=-1).masked_fill(scores.isneginf(), -torch.inf)  # a row of -inf stays one


def processed(scores: Tensor, history: History, chain: Iterable[Processor]) -> Tensor:
    """The scores after every processor in turn. [B, V]"""
    for processor in chain:
        scores = processor(scores, history)
    return scores


def need_tokens(chain: Iterable[Processor]) -> bool:
    """Whether any of them reads `history.tokens`; a callable that does not say is taken to."""
    return any(getattr(processor, "needs_tokens", True) for processor in chain)


def chain_of(settings: Any, facts: Facts) -> list[Processor]:
    """All that settings ask for, in order: `processors_of`, `filters_of`, `endings_of`."""
    return [*processors_of(settings, facts), *filters_of(settings), *endings_of(settings, facts)]


def processors_of(settings: Any, facts: Facts) -> list[Processor]:
    """Everything before the filters. `settings` has the names of `Settings`; None and neutral values ask for
    nothing."""
    vocab, device = facts.vocab, facts.device
    end_ids = ids_of(settings.eos_token_id)

    def ends() -> Tensor:
        return bans.mask_of(end_ids, vocab, device, "eos_token_id")

    beams = settings.num_beams or 1
    chain: list[Processor] = []
    if settings.sequence_bias:
        chain.append(bans.sequence_bias(settings.sequence_bias, vocab, device))
    if settings.encoder_repetition_penalty not in (None, 1):
        chain.append(penalties.SourceRepetition(settings.encoder_repetition_penalty))
    if settings.repetition_penalty not in (None, 1):
        chain.append(penalties.Repetition(settings.repetition_penalty))
    if settings.frequency_penalty or settings.presence_penalty:
        chain.append(penalties.Occurrence(settings.frequency_penalty or 0.0, settings.presence_penalty or 0.0))
    if settings.no_repeat_ngram_size:
        chain.append(bans.NoRepeatNgram(settings.no_repeat_ngram_size))
    if settings.encoder_no_repeat_ngram_size:
        chain.append(bans.NoSourceNgram(settings.encoder_no_repeat_ngram_size))
    if settings.min_length and end_ids:
        chain.append(bans.MinLength(settings.min_length, ends()))
    if settings.min_new_tokens and end_ids:
        chain.append(bans.MinNewTokens(settings.min_new_tokens, ends()))
    if settings.prefix_allowed_tokens_fn is not None:
        chain.append(forcing.Allowed(settings.prefix_allowed_tokens_fn, beams))
    if settings.grammar is not None:
        chain.append(grammar.grammar_of(settings.grammar, facts.tokenizer, end_ids, vocab, beams))
    if settings.bad_words_ids:
        words = bans.bad_words(settings.bad_words_ids, end_ids, vocab, device)
        chain += [] if words is None else [words]
    if settings.forced_bos_token_id is not None:
        first = bans.mask_of([settings.forced_bos_token_id], vocab, device, "forced_bos_token_id")
        chain.append(forcing.ForcedFirst(first))
    if settings.forced_eos_token_id is not None:
        chain.append(_forced_last(settings, facts))
    if settings.remove_invalid_values:
        chain.append(RemoveInvalid())
    if settings.exponential_decay_length_penalty is not None:
        if not end_ids:
            raise InputError("exponential_decay_length_penalty raises the score of end tokens: give eos_token_id")
        start, factor = settings.exponential_decay_length_penalty
        chain.append(penalties.LengthDecay(start, factor, ends()))
    if settings.suppress_tokens:
        never = bans.mask_of(settings.suppress_tokens, vocab, device, "suppress_tokens")
        chain.append(bans.Suppress(never))
    if settings.begin_suppress_tokens:
        begin = bans.mask_of(settings.begin_suppress_tokens, vocab, device, "begin_suppress_tokens")
        chain.append(bans.SuppressAtBegin(begin, after_forced=settings.forced_bos_token_id is not None))
    return with_callers(chain, settings.logits_processor or ())


def filters_of(settings: Any) -> list[Processor]:
    """What sampling cuts away; nothing when `do_sample` is False."""
    if not settings.do_sample:
        return []
    # A beam needs one id that does not end it, however many end tokens are among the best.
    ends = len(ids_of(settings.eos_token_id))
    keep = max(ends, 1) + 1 if (settings.num_beams or 1) > 1 else 1
    chain: list[Processor] = []
    if settings.temperature not in (None, 1):
        chain.append(filters.Temperature(settings.temperature))
    if settings.top_h is not None:
        chain.append(filters.TopH(settings.top_h))
    if settings.top_k:
        chain.append(filters.TopK(settings.top_k, keep))
    if settings.top_p is not None and settings.top_p != 1:
        chain.append(filters.TopP(settings.top_p, keep))
    if settings.min_p is not None:
        chain.append(filters.MinP(settings.min_p, keep))
    if settings.typical_p is not None and settings.typical_p != 1:
        chain.append(filters.Typical(settings.typical_p, keep))
    if settings.epsilon_cutoff:
        chain.append(filters.Epsilon(settings.epsilon_cutoff, keep))
    if settings.eta_cutoff:
        chain.append(filters.Eta(settings.eta_cutoff, keep))
    return chain


def endings_of(settings: Any, facts: Facts) -> list[Processor]:
    """What comes after the filters, sampling or not."""
    chain: list[Processor] = []
    if settings.watermarking_config is not None:
        chain.append(watermark_of(settings.watermarking_config, facts.vocab))
    if settings.renormalize_logits:
        chain.append(Renormalize())
    return chain


def with_callers(chain: Sequence[Processor], own: Sequence[Processor]) -> list[Processor]:
    """The chain, then the caller's own; one that has the type of a member takes that member's place."""
    places = {type(member): at for at, member in enumerate(chain)}
    merged, rest = list(chain), []
    for processor in own:
        if type(processor) in places:
            merged[places[type(processor)]] = processor
        else:
            rest.append(processor)
    return merged + rest


def ids_of(given: Any) -> list[int]:
    """One id, several or None, as a list."""
    return [] if given is None else [given] if isinstance(given, int) else [int(id) for id in given]


def _forced_last(settings: Any, facts: Facts) -> forcing.ForcedLast:
    """max_new_tokens is what counts where both lengths are given."""
    last = bans.mask_of(ids_of(settings.forced_eos_token_id), facts.vocab, facts.device, "forced_eos_token_id")
    if settings.max_new_tokens is None and settings.max_length is not None:
        return forcing.ForcedLast(last, settings.max_length, new=False)
    return forcing.ForcedLast(last, settings.max_new_tokens or forcing.NEW_TOKENS)
