"""`generate`: prompts into a cache, then a strategy makes tokens.

settings      what was asked for                              settings.py
prompt        any form -> ragged rows                         prompt.py, healing.py
cache         a new one, or a given one taken to the prompt   reuse.py
room          how long rows may get, and memory for it        context.py, room.py
logits        what is not held yet is fed                     prefill.py
run           processors, stopping, noise                     sampling/chain.py, stopping.py, run.py
strategy      one token after the other, beams, drafts …      run.py, strategies/captured.py, beams.py, speculation.py …
result        tokens, texts, reasons, what was asked besides  result.py, out_of_room.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.layers.cross import Source
from lamina.cache.recompute import recompute_cache
from lamina.errors import CapacityError, InputError
from lamina.generation.context_limit import positions_left
from lamina.generation.feed import prefill
from lamina.generation.introspect import Inside, look_inside
from lamina.generation.kept import Kept
from lamina.generation.out_of_room import cut_short, explained, reason_of
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.prompt import Prompt, from_rows, prompt_of
from lamina.generation.result import Result, Timing
from lamina.generation.reuse import Continuation, continuation, whole_rows
from lamina.generation.room import make_room, soon
from lamina.generation.row_ids import contents_of, given_numbers, row_numbers
from lamina.generation.run import Made, Run, Told
from lamina.generation.settings.arguments import check_arguments
from lamina.generation.settings.options import CALL, CallOptions, Options
from lamina.generation.settings.settings import Settings, settings_of
from lamina.generation.stopping import Reason, Stopping
from lamina.generation.strategies.beams import beam_search
from lamina.generation.strategies.captured import plainly, replayed, why_not_replayed
from lamina.generation.strategies.contrastive import contrastive_search
from lamina.generation.strategies.dola import dola, premature_layers
from lamina.generation.strategies.drafts import assistant_of
from lamina.generation.strategies.guide import guide_of, negative_of
from lamina.generation.strategies.healing import Healed, heal, only_healing
from lamina.generation.strategies.speculation import speculate
from lamina.generation.stream import Event, Pieces, Stream
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import check_exclusions

if TYPE_CHECKING:
    from lamina.model import Model

OWN = ("prompts", "stream", *CALL)


def generate(
    model: Model,
    prompts: Any = None,
    max_new_tokens: int | None = None,
    *,
    stream: Callable[[Event], object] | None = None,
    **options: Unpack[CallOptions],
) -> Result:
    """Continues each prompt until it ends.

    prompts         text, texts, ids, id lists, a tensor, a chat or chats; a source for encoder–decoder models. None
                    begins with the id that texts begin with, or goes on with the rows of the cache
    attention_mask  of a tensor: 1 where it is real; padding on the left or the right
    cache           continues its rows, one prompt each; a cache of one row serves any number of prompts
    whole           with a cache: True if prompts are whole sequences, of which it may hold a part, False if they are
                    what comes next. None decides row by row, and never drops what a row holds: text is what comes
                    next; ids and chats are whole sequences only where the row is a strict prefix of them
    prefixes        a store that remembers prompts and turns: what it knows of a prompt is not computed again
    row_ids         numbers from 0 to 2**32 - 1, one for each sequence, that draws depend on. None: a sequence's draws
                    depend on the seed, its prompt, and its index among equal prompts of the call
    stream          called with an Event (row, token, text, reason) for each new token; text is always whole characters
    and settings    see `lamina.generation.Settings`: max_new_tokens, do_sample, temperature, num_beams … Sampling keeps
                    the 50 best tokens unless top_k says otherwise, as transformers does; top_k=0 keeps all. A setting
                    of sampling, such as temperature, without do_sample samples too, with a notice

    >>> result = model.generate([[1, 2, 3], [4]], max_new_tokens=5)   # doctest: +SKIP
    >>> result.tokens, result.reasons                                 # doctest: +SKIP

    What a row that holds 5 6 7 goes on from, where "no" is encoded as 8, and with special tokens as 1 8:

    generate("no", cache=cache)                    5 6 7 8         text never gets a BOS there
    generate([[5, 6, 7, 8]], cache=cache)          5 6 7 8         whole, since 5 6 7 is a strict prefix of it
    generate([[5, 6, 7]], cache=cache)             5 6 7 5 6 7     not strict: it is what comes next
    generate([[5, 9]], cache=cache)                5 6 7 5 9       so is this
    generate([[5, 9]], cache=cache, whole=True)    5 9             the row is taken back to 5
    generate("no", cache=cache, whole=True)        1 8             the row is taken back to nothing
    generate("no", cache=model.new_cache())        1 8             an empty row
    generate(chat, cache=cache)                    as the ids that the chat template gives
    generate(cache=cache)                          5 6 7           nothing is fed
    """
    check_arguments(model, {"stream": stream})
    return _prepared(model, prompts, max_new_tokens, **options)(stream)


def stream(
    model: Model, prompts: Any = None, max_new_tokens: int | None = None, **options: Unpack[CallOptions]
) -> Stream[Result]:
    """The same as an iterator of events, sync or async; leaving the loop cancels.

    What cannot be generated is refused here. The model runs when the first event is asked for.

    >>> for event in model.stream("The sky is"):                      # doctest: +SKIP
    ...     print(event.text, end="")
    """
    return Stream(_prepared(model, prompts, max_new_tokens, **options))


def _prepared(
    model: Model,
    prompts: Any,
    max_new_tokens: int | None,
    *,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | Sequence[Tensor] | None = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Tensor | None = None,
    chat_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
    whole: bool | None = None,
    prefixes: PrefixStore | None = None,
    row_ids: Sequence[int] | Tensor | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[[Event], object] | None], Result]:
    """Checks everything that can be checked before the model runs. -> the run, which is given a listener or None"""
    check_arguments(model, {name: value for name, value in locals().items() if name in CALL})
    settings: dict[str, Any] = {**options}
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    chosen = settings_of(model, settings, also=OWN)
    prompt = prompt_of(
        model,
        prompts,
        attention_mask,
        inputs_embeds=inputs_embeds,
        decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask,
        settings=chosen,
        chat_options=chat_options,
        held=() if cache is None else cache.clock.sync(),
        whole=whole,
    )
    call = _Call(model, chosen, prompt, row_ids)
    call.check(cache, whole, prefixes)

    def run(stream: Callable[[Event], object] | None) -> Result:
        call.stream = stream
        with torch.no_grad(), nullcontext() if cache is None else cache.used_alone():
            return call.result(cache, whole, prefixes)

    return run


class _Call:
    """One call of generate. What can be wrong is found before a given cache changes."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        prompt: Prompt,
        row_ids: Sequence[int] | Tensor | None,
    ) -> None:
        self.model, self.settings = model, settings
        self.stream: Callable[[Event], object] | None = None
        if prompt.ids is not None:
            model.check_ids(prompt.ids, prompt.counts)
        elif settings.output_hidden_states or settings.output_attentions:
            raise InputError("hidden states and attentions are computed from ids: give ids instead of inputs_embeds")
        self.prompt, self.healed = prompt, list[Healed]()
        self.times = settings.num_return_sequences if settings.num_beams == 1 else 1  # how often each row is repeated
        self.row_ids = given_numbers(row_ids, len(prompt.counts) * self.times)
        check_exclusions(settings, model.vocab, settings.min_new_tokens or 0)
        self.chooser = _chooser(model, settings)
        if model.start_ids and (prompt.source is None or prompt.source.ids is None):
            for name, neutral in (("encoder_repetition_penalty", 1), ("encoder_no_repeat_ngram_size", 0)):
                if (value := getattr(settings, name)) != neutral:
                    raise InputError(f"{name}={value} looks at the source's ids, and none were given: leave it out")
        if settings.strategy == "assisted" and settings.prompt_lookup_num_tokens is None:
            assistant_of(model, settings)
        if settings.dola_layers is not None:
            premature_layers(model, settings.dola_layers)

    def check(self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None) -> None:
        """Refuses a cache or a store that the prompts cannot go to."""
        rows = len(self.prompt.counts)
        if prefixes is not None:
            prefixes._check(self.model, self.prompt, cache, self.settings.use_cache)
        if not self.settings.use_cache:
            self._check_uncached(cache)
        if cache is None:
            return
        if self.prompt.embeds is not None and whole:
            raise InputError("whole=True: embeddings cannot be compared with what the cache holds; give ids")
        if cache.rows not in (1, rows):
            raise InputError(f"{rows} prompts were given, the cache has {cache.rows} rows: give one for each row")

    def result(self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None) -> Result:
        started = time.perf_counter()
        run, plan = self._prefilled(cache, whole, prefixes)
        prefilled = time.perf_counter()

        def result(made: Made) -> Result:
            fed, count = (sum(len(row) for row in rows) for rows in (plan.rest, made.tokens))
            timing = Timing(fed, prefilled - started, count, time.perf_counter() - prefilled)
            return Result.of(self.model, self.settings, self.prompt, made, run, plan.reused, timing)

        try:
            made = self._decode(run)
        except CapacityError as error:
            made = cut_short(run, error)
            told = explained(error, sum(map(len, made.tokens)), made.cache.clock.sync())
            told.result = result(made)
            raise told from error
        found = result(made)
        if prefixes is not None:
            prefixes._keep_rows(made.cache)
        found._inside = self._inside(made)
        return found

    # -- before the first token ----------------------------------------------------------------------------------------

    def _prefilled(
        self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None
    ) -> tuple[Run, Continuation]:
        """A run after the prompts, and how its cache got there."""
        model, settings, times = self.model, self.settings, self.times
        source = self._encoded()
        if prefixes is not None:
            self._heal([False] * len(self.prompt.counts))
            room = max(soon(count, settings.most_new(count)) for count in self.prompt.counts)
            cache, known = prefixes._start(self.prompt.arrays, room)
            plan = Continuation.after(self.prompt.rows, known)
        else:
            cache, plan = self._place(cache, whole)
        prompt, lengths = self.prompt, plan.lengths(cache.clock.sync())
        negative = negative_of(model, settings, cache, plan.rest)
        stopping = self._stopping(lengths, negative)
        numbers = self._numbers(cache, plan)
        guide = guide_of(model, settings, negative, cache.rows * times, max(stopping.most))
        make_room(cache, lengths, stopping.most[::times])

        plan.begin(cache)
        if source is not None:
            cache.attach(source)
        try:
            if prefixes is not None:
                logits = prefixes._prefill(prompt, plan.rest, cache, settings.prefill_chunk)
            else:
                rest = prompt if prompt.embeds is not None else from_rows(plan.rest, allow_empty=True)
                logits = prefill(model, rest, cache, settings.prefill_chunk)
        except CapacityError as error:
            raise self._unread(error, cache, plan) from error
        if self.healed:
            logits = only_healing(logits, self.healed)
        if times > 1:
            cache, logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)
        run = Run(
            model, cache, logits, self.chooser, stopping, cache.clock.sync(), numbers, settings,
            self._told(stopping), self._source_ids(), guide, Kept.of(settings, cache.rows),
        )  # fmt: skip
        return run, plan

    def _place(self, cache: Cache | None, whole: bool | None) -> tuple[Cache, Continuation]:
        """The cache that the prompt goes to, and how its rows get there. Nothing that it holds is changed yet."""
        model, prompt, rows = self.model, self.prompt, len(self.prompt.counts)
        if not self.settings.use_cache or cache is None:
            self._heal([False] * rows)
            new = model.new_cache(rows) if self.settings.use_cache else recompute_cache(model, rows)
            return new, Continuation.of_new(self._fed)
        if whole is None and prompt.is_text:
            whole = False
        if prompt.embeds is not None:
            whole = False
        if cache.rows != rows:
            cache = cache.repeat(rows)
        if prompt.source is not None:  # everything a row holds depends on its source
            self._heal([False] * rows)
            return cache, replace(Continuation.of_new(self._fed), anew=list(range(rows)))
        held = cache.tokens
        chosen = whole_rows(held, self._fed, whole)  # by the prompts as they were given, before one is healed
        self._heal([bool(row) and not one for row, one in zip(held, chosen, strict=True)])
        return cache, continuation(cache, self._fed, chosen)

    @property
    def _fed(self) -> list[list[int]]:
        """The ids of each prompt; -1 for each embedding."""
        prompt = self.prompt
        return prompt.rows if prompt.embeds is None else [[-1] * count for count in prompt.counts]

    def _heal(self, follows: Sequence[bool]) -> None:
        """Takes last tokens back where the settings say so. follows: whether the prompt continues tokens of its row"""
        prompt, tokenizer = self.prompt, self.model.tokenizer
        if self.settings.token_healing and prompt.ids is not None and tokenizer is not None:
            self.healed = [heal(tokenizer, *one) for one in zip(prompt.rows, follows, strict=True)]
            shorter = from_rows([row.ids for row in self.healed], allow_empty=True)
            self.prompt = replace(prompt, ids=shorter.ids, counts=shorter.counts)

    def _unread(self, error: CapacityError, cache: Cache, plan: Continuation) -> CapacityError:
        """The error for prompts that there was no room for."""
        told, rows = explained(error, None, cache.clock.sync()), self.prompt.rows
        none: list[list[int]] = [[] for _ in rows]
        told.result = Result(rows, none, [reason_of(error)] * len(rows), plan.reused, _cache=cache)
        told.result.tokenizer, told.result.pad_id = self.model.tokenizer, self.settings.pad_token_id
        return told

    def _check_uncached(self, cache: Cache | None) -> None:
        if cache is not None:
            raise InputError("use_cache=False and a cache were given: leave one out")
        if self.prompt.embeds is not None:
            raise InputError("use_cache=False and inputs_embeds were given: without a cache, prompts are ids")

    def _numbers(self, cache: Cache, plan: Continuation) -> list[int]:
        """The number of each sequence that is made, which its draws depend on."""
        if self.row_ids is not None:
            return self.row_ids
        if not self.settings.do_sample:
            return list(range(len(plan.rest) * self.times))
        return row_numbers(contents_of(self.prompt, cache.tokens, plan), self.times)

    def _stopping(self, lengths: Sequence[int], negative: Prompt | None) -> Stopping:
        """lengths: of each prompt, how many tokens its row holds after it."""
        least = max(self.settings.least_new(length) for length in lengths)
        check_exclusions(self.settings, self.model.vocab, least)
        left = None
        if not self.settings.beyond_context:
            left = positions_left(self.model, lengths, None if negative is None else negative.counts)
        each = [row for row in range(len(lengths)) for _ in range(self.times)]
        return Stopping.of(
            self.settings, [lengths[row] for row in each], self.model.tokenizer,
            None if left is None else [left[row] for row in each],
        )  # fmt: skip

    def _told(self, stopping: Stopping) -> Told | None:
        if self.stream is None:
            return None
        stream, settings = self.stream, self.settings
        rows = len(self.prompt.counts) * settings.num_return_sequences
        pieces = Pieces(self.model.tokenizer, rows, settings.stop_strings)

        def told(row: int, token: int, reason: Reason | None) -> None:
            stream(pieces.event(row, token, reason, stopping.rows[row].cut))

        return told

    def _encoded(self) -> Source | None:
        """What the encoder makes of the source, where the prompt has one."""
        source = self.prompt.source
        return None if source is None else self.model.encode(source.ids, source.counts, source.embeds)

    def _source_ids(self) -> Tensor | None:
        """[B, E] the ids that the encoder reads, -1 past their end."""
        source = self.prompt.source
        if source is None or source.ids is None:
            return None
        there = torch.arange(source.ids.shape[1]) < torch.tensor(source.counts)[:, None]
        return source.ids.masked_fill(~there, -1).repeat_interleave(self.times, dim=0).to(self.model.device)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _decode(self, run: Run) -> Made:
        match self.settings.strategy:
            case "assisted":
                return speculate(run)
            case "beams":
                return beam_search(run)
            case "contrastive":
                return contrastive_search(run)
            case "dola":
                return dola(run)
        reason = why_not_replayed(run)
        return replayed(run) if reason is None else plainly(run, reason)

    def _inside(self, made: Made) -> Inside | None:
        """Hidden states and attentions, where someone asks for them."""
        asked = {"hidden": self.settings.output_hidden_states, "attentions": self.settings.output_attentions}
        if not any(asked.values()):
            return None
        return look_inside(made.cache, **asked)


def _chooser(model: Model, settings: Settings) -> Chooser:
    seed = settings.seed
    if seed is None:
        seed = int(torch.randint(2**62, ())) if settings.do_sample else 0
    chain = chain_of(settings, Facts(model.vocab, model.device, model.tokenizer))
    return Chooser(tuple(chain), settings.do_sample, seed - 2**64 if seed >= 2**63 else seed)  # the same 64 bits
