"""`generate`: prompts into a cache, then a strategy makes tokens.

settings      what was asked for                              settings.py
prompt        any form -> ragged rows                         prompt.py, healing.py
cache         a new one, or a given one taken to the prompt   continuation.py
logits        what is not held yet is fed                     prefill.py
run           processors, stopping, noise                     processors.py, stopping.py, run.py
strategy      one token after the other, beams, drafts …      run.py, replay.py, beams.py, speculation.py …
result        tokens, texts, reasons, what was asked besides  result.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.cache.cross import Source
from lamina.errors import InputError
from lamina.generation.beams import beam_search
from lamina.generation.continuation import Continuation, continuation
from lamina.generation.contrastive import contrastive_search
from lamina.generation.dola import dola
from lamina.generation.guide import Guide
from lamina.generation.healing import Healed, heal, only_healing
from lamina.generation.inside import Inside, look_inside, look_inside_rows
from lamina.generation.kept import Kept
from lamina.generation.prefill import prefill
from lamina.generation.prefixes import PrefixStore
from lamina.generation.processors import Facts, chain_of
from lamina.generation.prompt import Prompt, from_rows, prompt_of
from lamina.generation.replay import replayed, why_not_replayed
from lamina.generation.result import Result, Timing
from lamina.generation.run import Chooser, Made, Run, Told, one_by_one
from lamina.generation.settings import Settings, settings_of
from lamina.generation.speculation import speculate
from lamina.generation.stopping import Stopping
from lamina.generation.stream import Emit, Pieces, Stream
from lamina.generation.uncached import Uncached
from lamina.notices import notice

if TYPE_CHECKING:
    from lamina.model import Model

OWN = (
    "prompts", "attention_mask", "inputs_embeds", "decoder_input_ids", "cache", "whole", "prefixes", "row_ids",
    "stream",
)  # fmt: skip


def generate(
    model: Model,
    prompts: Any = None,
    max_new_tokens: int | None = None,
    *,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | Sequence[Tensor] | None = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Tensor | None = None,
    chat_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
    whole: bool | None = None,
    prefixes: PrefixStore | None = None,
    row_ids: Sequence[int] | None = None,
    stream: Callable[[int, int, str], None] | None = None,
    **settings: Any,
) -> Result:
    """Continues each prompt until it ends.

    prompts         text, texts, ids, id lists, a tensor, a chat or chats; None begins with the id that texts begin
                    with; a source for encoder–decoder models
    attention_mask  of a tensor: 1 where it is real; padding on the left or the right
    cache           continues its rows, one prompt each; a cache of one row serves any number of prompts
    whole           with a cache: whether prompts are whole sequences, of which it may hold the beginning, or only what
                    comes next. None: whole where prompt and cache begin with the same half of the shorter one
    prefixes        a store of what is known of earlier prompts: reused where prompts begin alike, and added to
    row_ids         the rows' own numbers, on which their draws depend; 0, 1, 2 … when None
    stream          called as stream(row, token, text) for each new token; text is always whole characters
    settings        see `lamina.generation.Settings`: max_new_tokens, do_sample, temperature, num_beams …

    >>> result = model.generate([[1, 2, 3], [4]], max_new_tokens=5)   # doctest: +SKIP
    >>> result.tokens, result.reasons                                 # doctest: +SKIP
    """
    if max_new_tokens is not None:
        settings["max_new_tokens"] = max_new_tokens
    chosen = settings_of(model, settings, also=OWN)
    prompt = prompt_of(
        model, prompts, attention_mask, inputs_embeds=inputs_embeds, decoder_input_ids=decoder_input_ids,
        decoder_attention_mask=decoder_attention_mask, settings=chosen, chat_options=chat_options,
        allow_empty=cache is not None,
    )  # fmt: skip
    told = None if stream is None else _told(model, stream, len(prompt.counts) * chosen.num_return_sequences)
    with torch.no_grad():
        return _Call(model, chosen, prompt, told).result(cache, whole, row_ids, prefixes)


def stream(model: Model, prompts: Any = None, max_new_tokens: int | None = None, **options: Any) -> Stream[Result]:
    """The same as an iterator of events, sync or async; leaving the loop cancels.

    >>> for event in model.stream("The sky is"):                      # doctest: +SKIP
    ...     print(event.text, end="")
    """

    def produce(emit: Emit) -> Result:
        events: list[Pieces] = []

        def told(row: int, token: int, reason: str | None) -> None:
            emit(events[0].event(row, token, reason))  # type: ignore[arg-type]

        own = {name: options.pop(name, None) for name in ("cache", "whole", "row_ids", "prefixes")}
        given = {name: options.pop(name) for name in list(options) if name in FORMS}
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        chosen = settings_of(model, options, also=OWN)
        prompt = prompt_of(model, prompts, settings=chosen, allow_empty=own["cache"] is not None, **given)
        events.append(Pieces(model.tokenizer, len(prompt.counts) * chosen.num_return_sequences))
        with torch.no_grad():
            return _Call(model, chosen, prompt, told).result(**own)

    return Stream(produce)


FORMS = ("attention_mask", "inputs_embeds", "decoder_input_ids", "decoder_attention_mask", "chat_options")


class _Call:
    """One call of generate."""

    def __init__(self, model: Model, settings: Settings, prompt: Prompt, told: Told | None) -> None:
        self.model, self.settings, self.told = model, settings, told
        self.healed: list[Healed] = []
        if settings.token_healing and prompt.ids is not None and model.tokenizer is not None:
            self.healed = [heal(model.tokenizer, row) for row in prompt.rows]
            prompt = replace(prompt, ids=from_rows([row.ids for row in self.healed]).ids)
            prompt = replace(prompt, counts=[len(row.ids) for row in self.healed])
        self.prompt = prompt

    def result(
        self, cache: Cache | None, whole: bool | None, row_ids: Sequence[int] | None, prefixes: PrefixStore | None
    ) -> Result:
        settings, prompt = self.settings, self.prompt
        if prefixes is not None:
            prefixes.check(self.model, prompt, cache, settings.use_cache)
        times = settings.num_return_sequences if settings.num_beams == 1 else 1
        if prompt.embeds is not None and (settings.output_hidden_states or settings.output_attentions):
            raise InputError("hidden states and attentions are computed from ids: give ids instead of inputs_embeds")
        started = time.perf_counter()
        if not settings.use_cache:
            run: Run = self._uncached(cache, times, row_ids)
            reused = [0] * len(prompt.counts)
        else:
            if prefixes is not None:
                cache, whole = prefixes.start(prompt.rows), True
            cache, source, plan = self._place(cache, whole)
            reused = plan.reused
            lengths = zip(cache.clock.sync(), plan.back, plan.rest, strict=True)
            held = [
                len(rest) + (0 if row in plan.anew else length - back)
                for row, (length, back, rest) in enumerate(lengths)
            ]
            stopping = self._stopping([length for length in held for _ in range(times)])
            cache.reserve(max(length + most for length, most in zip(held, stopping.most[::times], strict=True)))
            plan.begin(cache)
            if source is not None:
                cache.attach(source)
            rest = plan.rest if prompt.embeds is None else None
            feed = prefill if prefixes is None else prefixes.prefill
            logits = feed(self.model, prompt, cache, settings.prefill_chunk, rest)
            if self.healed:
                logits = only_healing(logits, self.healed)
            if times > 1:
                cache, logits = cache.repeat(times), logits.repeat_interleave(times, dim=0)
            run = self._run(cache, logits, stopping, times, row_ids)
        prefilled = time.perf_counter()
        made = self._decode(run)
        finished = time.perf_counter()
        if prefixes is not None:
            prefixes.keep(made.cache)
        count = sum(len(row) for row in made.tokens)
        fed = sum(prompt.counts) - sum(reused)
        timing = Timing(fed, prefilled - started, count, finished - prefilled)
        result = Result.of(self.model, settings, prompt, made, run, reused, timing)
        result.inside = self._inside(run, made)
        return result

    # -- before the first token ----------------------------------------------------------------------------------------

    def _place(self, cache: Cache | None, whole: bool | None) -> tuple[Cache, Source | None, Continuation]:
        """The cache that the prompt goes to, the source to attach to it, and how its rows get there. Nothing that the
        cache holds is changed yet."""
        model, prompt, rows = self.model, self.prompt, len(self.prompt.counts)
        given = prompt.rows if prompt.embeds is None else [[-1] * count for count in prompt.counts]
        if prompt.ids is not None:
            model.check_ids(prompt.ids, prompt.counts)
        source = None
        if prompt.source is not None:
            source = model.encode(prompt.source.ids, prompt.source.counts, prompt.source.embeds)
        if cache is None:
            return model.new_cache(rows), source, Continuation([0] * rows, [], given, [0] * rows)
        if cache.model is not model:
            raise InputError("this cache was made by another model; make one with this model's new_cache()")
        if cache.rows != rows:
            if cache.rows != 1:
                raise InputError(f"{rows} prompts were given, the cache has {cache.rows} rows: give one for each row")
            cache = cache.repeat(rows)
        return cache, source, continuation(cache, given, False if prompt.embeds is not None else whole)

    def _stopping(self, prompts: Sequence[int]) -> Stopping:
        for prompt in prompts:
            self.settings.least_new(prompt)
        return Stopping.of(self.settings, prompts, self.model.tokenizer)

    def _run(self, cache: Cache, logits: Tensor, stopping: Stopping, times: int, row_ids: Sequence[int] | None) -> Run:
        settings, rows = self.settings, cache.rows
        return Run(
            self.model, cache, logits, self._chooser(), stopping, cache.clock.sync(), self._numbers(rows, row_ids),
            settings, self.told, self._source(times), self._guide(times), Kept.of(settings, rows),
        )  # fmt: skip

    def _uncached(self, cache: Cache | None, times: int, row_ids: Sequence[int] | None) -> Uncached:
        """A run that keeps nothing: every pass is over whole sequences."""
        settings, prompt = self.settings, self.prompt
        if cache is not None:
            raise InputError("use_cache=False and a cache were given: leave one out")
        if settings.strategy != "plain" or prompt.embeds is not None or settings.guidance_scale not in (None, 1.0):
            raise InputError(
                f"use_cache=False decodes ids one token after the other, and {settings!r} asks for more: leave it out"
            )
        rows = [row for row in prompt.rows for _ in range(times)]
        source = None
        if prompt.source is not None:
            source = self.model.encode(prompt.source.ids, prompt.source.counts, prompt.source.embeds)
            source = source.select([row for row in range(len(prompt.counts)) for _ in range(times)])
        stopping, numbers = self._stopping([len(row) for row in rows]), self._numbers(len(rows), row_ids)
        kept = Kept.of(settings, len(rows))
        run = Uncached.of(self.model, rows, source, self._chooser(), stopping, numbers, settings, self.told, kept)
        run.source = self._source(times)
        if self.healed:
            run.logits = only_healing(run.logits, [one for one in self.healed for _ in range(times)])
        return run

    def _chooser(self) -> Chooser:
        settings, model = self.settings, self.model
        facts = Facts(model.vocab, model.device, model.tokenizer)
        seed = settings.seed if settings.seed is not None else int(torch.randint(2**62, ()))
        return Chooser(tuple(chain_of(settings, facts)), settings.do_sample, seed)

    def _numbers(self, rows: int, row_ids: Sequence[int] | None) -> list[int]:
        numbers = list(range(rows)) if row_ids is None else list(row_ids)
        if len(numbers) != rows:
            raise InputError(f"row_ids has {len(numbers)} numbers for {rows} sequences: give one for each")
        return numbers

    def _source(self, times: int) -> Tensor | None:
        source = self.prompt.source
        if source is None or source.ids is None:
            return None
        ids = source.ids.to(self.model.device)
        real = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(source.counts, device=ids.device)[:, None]
        return ids.masked_fill(~real, -1).repeat_interleave(times, dim=0)

    def _guide(self, times: int) -> Guide | None:
        settings, model = self.settings, self.model
        if settings.guidance_scale in (None, 1.0):
            return None
        assert settings.guidance_scale is not None
        if settings.strategy != "plain":
            raise InputError(f"guidance_scale={settings.guidance_scale} works with plain decoding, not with {settings!r}")  # fmt: skip  # noqa: E501
        if settings.negative_prompt is None:
            prompt = from_rows([row[-1:] for row in self.prompt.rows])
        else:
            prompt = prompt_of(model, settings.negative_prompt, settings=settings)
        rows = len(self.prompt.counts)
        if len(prompt.counts) not in (1, rows):
            raise InputError(f"{len(prompt.counts)} negative prompts were given for {rows} prompts: give one, or as many")  # fmt: skip  # noqa: E501
        each = times if len(prompt.counts) == rows else times * rows
        return Guide(model, prompt, settings.guidance_scale, each, settings.prefill_chunk)

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
        if isinstance(run, Uncached):
            return one_by_one(run)
        reason = why_not_replayed(run)
        if reason is None:
            return replayed(run)
        notice(f"decoding by plain passes, since {reason}")
        made = one_by_one(run)
        made.how = f"plain passes, since {reason}"
        return made

    def _inside(self, run: Run, made: Made) -> Inside | None:
        """Hidden states and attentions, where someone asks for them."""
        asked = {"hidden": self.settings.output_hidden_states, "attentions": self.settings.output_attentions}
        if not any(asked.values()):
            return None
        if isinstance(run, Uncached):
            return look_inside_rows(self.model, run.texts, run.encoded, **asked)
        return look_inside(made.cache, **asked)


def _told(model: Model, stream: Callable[[int, int, str], None], rows: int) -> Told:
    pieces = Pieces(model.tokenizer, rows)

    def told(row: int, token: int, reason: str | None) -> None:
        stream(row, token, pieces.event(row, token, reason).text)  # type: ignore[arg-type]

    return told
