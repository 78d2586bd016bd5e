"""`Call`: one call of `generate`, from a checked prompt to a Result.

settings    what the caller asked for                          settings/
prompt      any form -> ragged rows                            prompt.py, strategies/healing.py
cache       a new one, or a given one rewound to the prompt    reuse.py, prefix_store.py
room        how long rows may get, and memory for them         room.py
prefill     feeds the tokens that the cache does not hold      feed.py
run         processors, stopping rules, row ids                run.py, stopping.py, row_ids.py, lamina/sampling
strategy    decodes the new tokens                             strategies/
result      tokens, texts, reasons, recorded outputs           result.py, out_of_room.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.layers.cross import Source
from lamina.cache.recompute import recompute_cache
from lamina.errors import CapacityError, InputError
from lamina.generation.feed import prefill
from lamina.generation.introspect import Introspection, introspect
from lamina.generation.out_of_room import explain_error, output_so_far, reason_of
from lamina.generation.prefill.scorer import Scorer
from lamina.generation.prefill.watch import Watch
from lamina.generation.prefix_store import PrefixStore
from lamina.generation.prompt import Prompt, from_rows
from lamina.generation.result import Recorder, Result, Timing
from lamina.generation.reuse import Continuation, continuation, whole_rows
from lamina.generation.room import initial_room, make_room, positions_left
from lamina.generation.row_ids import check_row_ids, contents_of, hash_rows
from lamina.generation.run import OnToken, Run, StrategyOutput
from lamina.generation.stopping import Reason, Stopping
from lamina.generation.strategies.beams import beam_search
from lamina.generation.strategies.captured import decode_captured, why_plain
from lamina.generation.strategies.contrastive import contrastive_search
from lamina.generation.strategies.dola import check_layers, dola
from lamina.generation.strategies.drafts import assistant_of, check_source_ids, refuse_embeddings
from lamina.generation.strategies.guide import guide_of, negative_prompt_of
from lamina.generation.strategies.healing import HealedPrompt, heal, mask_to_healing
from lamina.generation.strategies.plain import decode_plain
from lamina.generation.strategies.speculation import speculate
from lamina.generation.stream import Emit, Event, EventBuilder
from lamina.runtime.eligibility import why_no_graphs
from lamina.runtime.graphs import weights_stay
from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from lamina.sampling.exclusion import check_exclusions

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.model import Model

READ_WHOLE_ROWS = (
    "assistant_model", "assistant_early_exit", "penalty_alpha", "dola_layers", "output_hidden_states",
    "output_attentions",
)  # fmt: skip
"""Settings for which the ids of whole rows are fed again, so that rows may not hold embeddings."""


class Call:
    """One call of `generate`. Errors in the input are raised before a given cache changes."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        prompt: Prompt,
        row_ids: Sequence[int] | Tensor | None,
    ) -> None:
        self.model, self.settings = model, settings
        self.stream: Callable[[Event], object] | None = None
        self.watch = Watch()
        if prompt.ids is not None:
            model.check_ids(prompt.ids, prompt.counts)
        elif settings.output_hidden_states or settings.output_attentions:
            raise InputError("hidden states and attentions are computed from ids: give ids instead of inputs_embeds")
        elif settings.prompt_logprobs is not None:
            raise InputError("prompt_logprobs are those of ids: give ids instead of inputs_embeds")
        self.prompt, self.healed = prompt, list[HealedPrompt]()
        self._reads_whole_rows = [name for name in READ_WHOLE_ROWS if getattr(settings, name)]
        self.times = settings.num_return_sequences if settings.num_beams == 1 else 1  # copies of each row
        self.row_ids = check_row_ids(row_ids, len(prompt.counts) * self.times)
        check_exclusions(settings, model.vocab, settings.min_new_tokens or 0)
        self.chooser = _chooser(model, settings)
        if model.start_ids and (prompt.source is None or prompt.source.ids is None):
            for name, neutral in (("encoder_repetition_penalty", 1), ("encoder_no_repeat_ngram_size", 0)):
                if (value := getattr(settings, name)) != neutral:
                    raise InputError(f"{name}={value} reads the source's ids, and none were given: leave it out")
        if settings.strategy == "assisted" and settings.prompt_lookup_num_tokens is None:
            assistant = assistant_of(model, settings)
            if settings.assistant_model is not None:
                check_source_ids(None if prompt.source is None else prompt.source.ids, assistant)
        if settings.dola_layers is not None:
            check_layers(model, settings.dola_layers)

    def check(self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None) -> None:
        """Raises if the prompts cannot continue this cache, or start from this store."""
        rows = len(self.prompt.counts)
        if prefixes is not None:
            prefixes._check(self.model, self.prompt, cache, self.settings.use_cache)
        if not self.settings.use_cache:
            self._check_uncached(cache)
        if cache is None:
            return
        if self.prompt.embeds is not None and whole:
            raise InputError("whole=True: embeddings cannot be compared with the tokens of the cache; give ids")
        if cache.rows not in (1, rows):
            raise InputError(f"{rows} prompts were given, the cache has {cache.rows} rows: give one for each row")

    def _check_uncached(self, cache: Cache | None) -> None:
        if cache is not None:
            raise InputError("use_cache=False and a cache were given: leave one out")
        if self.prompt.embeds is not None:
            raise InputError("use_cache=False and inputs_embeds were given: without a cache, prompts are ids")

    def result(self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None) -> Result:
        """Runs prefill and the strategy."""
        with weights_stay():
            return self._result(cache, whole, prefixes)

    def _result(self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None) -> Result:
        started = time.perf_counter()
        run, plan = self._prefill(cache, whole, prefixes)
        prefilled = time.perf_counter()

        def result_of(made: StrategyOutput) -> Result:
            fed, count = (sum(len(row) for row in rows) for rows in (plan.rest, made.tokens))
            timing = Timing(
                fed, prefilled - started, count, time.perf_counter() - prefilled, self.watch.passes, self.watch.chunk
            )
            return Result.of(self.model, self.settings, self.prompt, made, run, plan.reused, timing, self.watch)

        try:
            made = self._decode(run)
        except CapacityError as error:
            made = output_so_far(run, error)
            explained = explain_error(error, sum(map(len, made.tokens)), made.cache.clock.sync())
            explained.result = result_of(made)
            raise explained from error
        result = result_of(made)
        if prefixes is not None:
            prefixes._keep_rows(made.cache)
        result._inside = self._introspect(made)
        return result

    # -- before the first token ----------------------------------------------------------------------------------------

    def _prefill(
        self, cache: Cache | None, whole: bool | None, prefixes: PrefixStore | None
    ) -> tuple[Run, Continuation]:
        """Feeds the prompts. -> the run after them, and the plan by which the cache got there"""
        model, settings, times = self.model, self.settings, self.times
        source = self._encode_source()
        if prefixes is not None:
            self._heal([False] * len(self.prompt.counts))
            room = max(initial_room(count, settings.most_new(count)) for count in self.prompt.counts)
            cache, known = prefixes._start(self.prompt.arrays, room)
            plan = Continuation.after(self.prompt.rows, known)
        else:
            cache, plan = self._plan(cache, whole)
        prompt, lengths = self.prompt, plan.lengths(cache.clock.sync())
        negative = negative_prompt_of(model, settings, cache, plan.rest)
        stopping = self._stopping(lengths, negative)
        row_ids = self._row_ids(cache, plan)
        guide = guide_of(model, settings, negative, cache.rows * times, max(stopping.most))
        if self._reads_whole_rows:
            self._check_ids(plan.texts(cache.tokens))
        make_room(cache, lengths, stopping.most[::times])

        plan.apply(cache)
        if source is not None:
            cache.attach(source)
        watch = self.watch
        if settings.prompt_logprobs is not None:
            watch.scorer = Scorer(model, plan.rest, settings.prompt_logprobs)
        if isinstance(self.stream, Emit):
            watch.check = self.stream.check
        try:
            if prefixes is not None:
                logits = prefixes._prefill(prompt, plan.rest, cache, settings.prefill_chunk, watch)
            else:
                whole_prompt = prompt.embeds is not None or plan.rest == prompt.rows
                rest = prompt if whole_prompt else from_rows(plan.rest, allow_empty=True)
                logits = prefill(model, rest, cache, settings.prefill_chunk, watch)
        except CapacityError as error:
            raise self._prefill_error(error, cache, plan) from error
        if self.healed:
            logits = mask_to_healing(logits, self.healed)
        if times > 1:
            cache, logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)
        run = Run(
            model, cache, logits, self.chooser, stopping, cache.clock.sync(), row_ids, settings,
            self._on_token(stopping), self._source_ids(), guide, Recorder.of(settings, cache.rows),
        )  # fmt: skip
        return run, plan

    def _check_ids(self, texts: Sequence[Sequence[int]]) -> None:
        """Raises if a row would hold embeddings. texts: ids of each row"""
        name = self._reads_whole_rows[0]
        if name.startswith("assistant"):
            refuse_embeddings(texts)
        for row, text in enumerate(texts):
            if -1 in text:
                raise InputError(
                    f"token {list(text).index(-1)} of row {row} was given as an embedding, and {name} reads whole rows "
                    "of ids: give ids, or leave it out"
                )

    def _plan(self, cache: Cache | None, whole: bool | None) -> tuple[Cache, Continuation]:
        """-> the cache that the prompt is fed to, and the plan that takes its rows there. It is not applied yet."""
        model, prompt, rows = self.model, self.prompt, len(self.prompt.counts)
        if not self.settings.use_cache or cache is None:
            self._heal([False] * rows)
            new = model.new_cache(rows) if self.settings.use_cache else recompute_cache(model, rows)
            return new, Continuation.of_new(self._prompt_ids)
        if whole is None and prompt.is_text:
            whole = False
        if prompt.embeds is not None:
            whole = False
        if cache.rows != rows:
            cache = cache.repeat(rows)
        if prompt.source is not None:  # all tokens of a row depend on its source, so rows restart
            self._heal([False] * rows)
            return cache, replace(Continuation.of_new(self._prompt_ids), restart=list(range(rows)))
        held = cache.tokens
        is_whole = whole_rows(held, self._prompt_ids, whole)  # decided by the prompts as given, before healing
        self._heal([bool(row) and not one for row, one in zip(held, is_whole, strict=True)])
        return cache, continuation(cache, self._prompt_ids, is_whole)

    @property
    def _prompt_ids(self) -> list[list[int]]:
        """The ids of each prompt; -1 for each embedding."""
        prompt = self.prompt
        return prompt.rows if prompt.embeds is None else [[-1] * count for count in prompt.counts]

    def _heal(self, follows: Sequence[bool]) -> None:
        """Token healing, if asked for: removes last tokens of prompts. follows: whether the prompt follows tokens of
        its row"""
        prompt, tokenizer = self.prompt, self.model.tokenizer
        if self.settings.token_healing and prompt.ids is not None and tokenizer is not None:
            self.healed = [heal(tokenizer, *one) for one in zip(prompt.rows, follows, strict=True)]
            shorter = from_rows([row.ids for row in self.healed], allow_empty=True)
            self.prompt = replace(prompt, ids=shorter.ids, counts=shorter.counts)

    def _prefill_error(self, error: CapacityError, cache: Cache, plan: Continuation) -> CapacityError:
        """The error for prompts that do not fit."""
        explained, rows = explain_error(error, None, cache.clock.sync()), self.prompt.rows
        none: list[list[int]] = [[] for _ in rows]
        explained.result = Result(rows, none, [reason_of(error)] * len(rows), plan.reused, _cache=cache)
        explained.result.tokenizer, explained.result.pad_id = self.model.tokenizer, self.settings.pad_token_id
        return explained

    def _row_ids(self, cache: Cache, plan: Continuation) -> list[int]:
        """The row id of each sequence to generate."""
        if self.row_ids is not None:
            return self.row_ids
        if not self.settings.do_sample:
            return list(range(len(plan.rest) * self.times))
        contents = contents_of(self.prompt, cache.tokens, plan)
        if self.healed:  # prompts that differ in the removed token are not equal
            contents = [content + one.text.encode() for content, one in zip(contents, self.healed, strict=True)]
        return hash_rows(contents, self.times)

    def _stopping(self, lengths: Sequence[int], negative: Prompt | None) -> Stopping:
        """The stopping rules. lengths: tokens that each row holds after its prompt"""
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

    def _on_token(self, stopping: Stopping) -> OnToken | None:
        """Builds an event from each new token for the caller's `stream` function."""
        if self.stream is None:
            return None
        stream, settings = self.stream, self.settings
        rows = len(self.prompt.counts) * settings.num_return_sequences
        events = EventBuilder(self.model.tokenizer, rows, settings.stop_strings)

        def on_token(row: int, token: int, reason: Reason | None) -> None:
            stream(events.event(row, token, reason, stopping.rows[row].stop_char))

        return on_token

    def _encode_source(self) -> Source | None:
        """The encoder's output for the prompt's source; None for decoder-only models."""
        source = self.prompt.source
        return None if source is None else self.model.encode(source.ids, source.counts, source.embeds)

    def _source_ids(self) -> Tensor | None:
        """[B, E] the ids that the encoder reads, padded with -1."""
        source = self.prompt.source
        if source is None or source.ids is None:
            return None
        there = torch.arange(source.ids.shape[1]) < torch.tensor(source.counts)[:, None]
        return source.ids.masked_fill(~there, -1).repeat_interleave(self.times, dim=0).to(self.model.device)

    # -- new tokens ----------------------------------------------------------------------------------------------------

    def _decode(self, run: Run) -> StrategyOutput:
        match self.settings.strategy:
            case "assisted":
                return speculate(run)
            case "beams":
                return beam_search(run)
            case "contrastive":
                return contrastive_search(run)
            case "dola":
                return dola(run)
        reason = why_plain(run)
        if reason is not None:
            return decode_plain(run, reason)
        return decode_captured(run, native=why_no_graphs(self.model) is not None)

    def _introspect(self, made: StrategyOutput) -> Introspection | None:
        """Hidden states and attention weights, if asked for."""
        asked = {"hidden": self.settings.output_hidden_states, "attentions": self.settings.output_attentions}
        return introspect(made.cache, **asked) if any(asked.values()) else None


def _chooser(model: Model, settings: Settings) -> Chooser:
    seed = settings.seed
    if seed is None:
        seed = int(torch.randint(2**62, ())) if settings.do_sample else 0
    chain = chain_of(settings, Facts(model.vocab, model.device, model.tokenizer))
    return Chooser(tuple(chain), settings.do_sample, seed - 2**64 if seed >= 2**63 else seed)  # uint64 -> int64 bits
