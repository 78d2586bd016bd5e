"""`Result`: what a call of `generate` returns. Also the recorder of optional per-token outputs, and trimming of stop
strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import InputError
from lamina.generation.feed import prefill
from lamina.generation.introspect import Introspection
from lamina.generation.prompt import Prompt, from_rows
from lamina.generation.reuse import continuation

if TYPE_CHECKING:
    from lamina.generation.prefill.scorer import Scorer
    from lamina.generation.prefill.watch import Watch
    from lamina.generation.run import Run, StrategyOutput
    from lamina.generation.settings.settings import Settings
    from lamina.generation.strategies.speculation import SpeculationStats
    from lamina.model import Model

SHOWN_ROWS, SHOWN_TOKENS, SHOWN_LETTERS = 3, 8, 60  # limits of `repr(result)`
NOT_TRIMMABLE = (
    "the rows cannot be rewound to before their stop strings, and cannot be recomputed from their ids, since {why}: "
    "generate with cache=model.new_cache(rows, slack=…), with a slack of the tokens of a stop string and one more"
)


@dataclass
class Timing:
    """Tokens and seconds of prefill (prompt) and decoding (new)."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0
    prompt_passes: int = 0
    """Passes in which the prompts were fed."""
    prompt_chunk: int = 0
    """The most tokens of one row in a pass: `prefill_chunk`, or what was chosen by the memory there is."""

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of decoding; prefill is not counted."""
        return self.new_tokens / self.new_seconds if self.new_seconds else 0.0


@dataclass(repr=False)
class Result:
    """One row per generated sequence: `num_return_sequences` adjacent rows for each prompt."""

    prompts: list[list[int]]
    """The ids of each row's prompt; empty if it was given as embeddings without ids."""
    tokens: list[list[int]]
    """The new ids of each row, including the one that ended it."""
    reasons: list[str]
    """Why each row ended: "eos", "length", "context" (the row fills the model's context), "stop" or "time"; in
    `error.result` also "pages" or "capacity", if the cache had no room."""
    reused: list[int] = field(default_factory=list)
    """Tokens of each prompt that the given cache or the prefix store already held, so they were not fed."""
    how: str = ""
    """How the tokens were decoded, and why a faster way was not used."""
    timing: Timing = field(default_factory=Timing)
    prompt_how: str = ""
    """How the prompts were fed: passes, captured or packed or not and why, and which attention ran."""
    tokenizer: Tokenizer | None = None
    pad_id: int = 0
    before: list[int | None] = field(default_factory=list)
    """New tokens of each row before the stop string that ended it; None without one."""
    row_ids: list[int] = field(default_factory=list)
    """The row ids that the sampling draws depended on. A call with `cache=result.cache, row_ids=result.row_ids` and the
    same seed samples the tokens that one longer call would have. Without row_ids, a continued row draws as its whole
    text would as a prompt."""
    _cuts: list[int | None] = field(default_factory=list)  # index in each row's text of the stop string that ended it
    _cache: Cache | None = None
    _recorded: Recorder | None = None  # logits, scores and log-probabilities that were asked for
    _inside: Introspection | None = None  # hidden states and attention weights that were asked for
    _extra: dict[str, Any] = field(default_factory=dict)  # values of one strategy, by name: see `StrategyOutput.more`
    _prompt_logprobs: list[list[Logprob | None]] | None = None

    @classmethod
    def of(
        cls, model: Model, settings: Settings, prompt: Prompt, made: StrategyOutput, run: Run, reused: Sequence[int],
        timing: Timing, watch: Watch,
    ) -> Result:  # fmt: skip
        """The result of a run. reused: per prompt"""
        times = len(made.tokens) // len(prompt.counts)
        each = [row for row in range(len(prompt.counts)) for _ in range(times)]
        rows, stopping, scorer = prompt.rows, run.stopping, watch.scorer
        return cls(
            [rows[row] for row in each], made.tokens, made.reasons, [reused[row] for row in each], made.how, timing,
            watch.how, model.tokenizer, settings.pad_token_id, stopping.stop_tokens, run.row_ids, stopping.stop_chars,
            made.cache if settings.use_cache else None, run.recorder, _extra=made.more,
            _prompt_logprobs=None if scorer is None else [_of_prompt(scorer, rows[row], row) for row in each],
        )  # fmt: skip

    def __repr__(self) -> str:
        """The number of rows, and for the first few: the number of new tokens, the reason, and the beginning.

        >>> Result([[1]], [[5, 6]], ["eos"])
        Result(1 row: 2 tokens, eos, [5, 6])
        """
        rows = [self._shown(row) for row in range(min(len(self.tokens), SHOWN_ROWS))]
        more = ["…"] if len(self.tokens) > SHOWN_ROWS else []
        count = f"{len(self.tokens)} row{'' if len(self.tokens) == 1 else 's'}"
        return f"Result({': '.join([count, *(['; '.join([*rows, *more])] if rows else [])])})"

    def _shown(self, row: int) -> str:
        tokens, reason = self.tokens[row], self.reasons[row]
        if self.tokenizer is None:
            begin = repr(tokens[:SHOWN_TOKENS])[:-1] + (", …]" if len(tokens) > SHOWN_TOKENS else "]")
        else:
            text = self.tokenizer.decode(tokens[: 2 * SHOWN_TOKENS])[: self._cuts[row] if self._cuts else None]
            begin = repr(text[:SHOWN_LETTERS])
            if len(text) > SHOWN_LETTERS or len(tokens) > 2 * SHOWN_TOKENS:
                begin = f"{begin[:-1]}…{begin[-1]}"
        return f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}, {reason}, {begin}"

    @property
    def cache(self) -> Cache:
        """The cache that holds every row's prompt and new tokens, ready to be continued. It includes the tokens of stop
        strings, which `text` leaves out; `trimmed()` returns a cache without them."""
        if self._cache is None:
            raise InputError("use_cache=False keeps nothing: generate without it to get a cache that can be continued")
        return self._cache

    def trimmed(self) -> Cache:
        """A copy of the cache whose rows end before the stop string that ended them, as `text` does. A token that spans
        the end of the text and the beginning of the stop string is removed whole.

        A row that cannot be rewound that far (sliding windows and recurrent states without slack) is recomputed from
        its ids. The copy takes the memory of the rows; in a pool it shares their pages and takes none.

        >>> result = model.generate("Q: Why?\\nA:", stop_strings="\\nQ:")         # doctest: +SKIP
        >>> model.generate("\\nThanks!", cache=result.trimmed())                 # doctest: +SKIP
        """
        return _without_stop_strings(self)

    @property
    def text(self) -> list[str]:
        """The new text of each row, without a stop string that ended it."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: read result.tokens instead")
        texts = [self.tokenizer.decode(row) for row in self.tokens]
        return [text[:cut] for text, cut in zip(texts, self._cuts or [None] * len(texts), strict=True)]

    @property
    def sequences(self) -> Tensor:
        """Prompt and new tokens of each row, padded on the right. [B, longest]"""
        rows = [torch.tensor(prompt + new) for prompt, new in zip(self.prompts, self.tokens, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)

    @property
    def scores(self) -> list[Tensor]:
        """Per row, the processed scores [n, V] that its tokens were chosen from; with output_scores=True."""
        return self._stacked("scores")

    @property
    def logits(self) -> list[Tensor]:
        """Per row, the model's logits [n, V] before processors; with output_logits=True."""
        return self._stacked("logits")

    @property
    def logprobs(self) -> list[list[Logprob]]:
        """Per row, the log-probability of each new token and of the n most likely ones; with logprobs=n."""
        if self._recorded is None or self._recorded.logprobs is None:
            raise InputError(
                "log-probabilities were not kept: generate with logprobs=0, or with logprobs=5 for the five best too"
            )
        return self._recorded.logprobs

    @property
    def prompt_logprobs(self) -> list[list[Logprob | None]]:
        """Per row, the log-probability of each token of its prompt and of the n most likely ones; with
        prompt_logprobs=n. None for a first token, which nothing comes before, and for tokens that a cache or prefix
        store held already."""
        if self._prompt_logprobs is None:
            raise InputError("log-probabilities of the prompt were not kept: generate with prompt_logprobs=0 or more")
        return self._prompt_logprobs

    @property
    def hidden_states(self) -> list[list[Tensor]]:
        """Per row, the hidden states of prompt and new tokens, [tokens, width] for each layer; with
        output_hidden_states=True."""
        return self._states("hidden")

    @property
    def attentions(self) -> list[dict[tuple[int, str], Tensor]]:
        """Per row, the attention weights [heads, tokens, keys] by (layer, entry); with output_attentions=True."""
        return self._states("attentions")

    @property
    def speculation(self) -> SpeculationStats:
        """Counts of drafted and accepted tokens, per row; with speculation (`prompt_lookup_num_tokens=` and others)."""
        return self._of_strategy("speculation", "generate with prompt_lookup_num_tokens=8 or an assistant_model")

    @property
    def sequences_scores(self) -> list[float]:
        """Per row, the sum of its log-probabilities / length ** length_penalty; with num_beams."""
        return self._of_strategy("sequences_scores", "generate with num_beams=4 or another number of beams")

    @property
    def beam_indices(self) -> list[list[int]]:
        """Per row, the beam that each token continued: prompt · num_beams + rank; with num_beams."""
        return self._of_strategy("beam_indices", "generate with num_beams=4 or another number of beams")

    def _of_strategy(self, name: str, way: str) -> Any:
        if name not in self._extra:
            raise InputError(f"this result has no {name}: {way}")
        return self._extra[name]

    def _states(self, name: str) -> list[Any]:
        found = None if self._inside is None else getattr(self._inside, name)
        if not found:
            asked = "output_hidden_states" if name == "hidden" else "output_attentions"
            raise InputError(f"this was not asked for: generate with {asked}=True")
        return found

    def _stacked(self, name: str) -> list[Tensor]:
        rows = None if self._recorded is None else getattr(self._recorded, name)
        if rows is None:
            raise InputError(f"{name} were not kept: generate with output_{name}=True")
        return [torch.stack(row) for row in rows]


# -- optional outputs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a new token by the model's logits, and the `top` most likely tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Recorder:
    """Records logits, scores and log-probabilities of new tokens: per row, one entry per token. None if not asked for.

    logits     [V] as the model computed them
    scores     [V] after guidance and processors: what the token was chosen from
    logprobs   of the chosen token and of the `top` most likely ones, by the logits
    """

    logits: list[list[Tensor]] | None = None
    scores: list[list[Tensor]] | None = None
    logprobs: list[list[Logprob]] | None = None
    top: int = 0

    @classmethod
    def of(cls, settings: Settings, rows: int) -> Recorder | None:
        """A recorder of the outputs that the settings ask for; None if they ask for none."""

        def lists(asked: bool) -> list[list[Any]] | None:
            return [[] for _ in range(rows)] if asked else None

        recorder = cls(
            lists(settings.output_logits), lists(settings.output_scores), lists(settings.logprobs is not None)
        )
        recorder.top = settings.logprobs or 0
        return None if recorder == cls() else recorder

    def add(self, rows: Sequence[int], logits: Tensor, scores: Tensor, chosen: Tensor) -> None:
        """Records one token of each of these rows [R]: logits and scores [R, V], chosen tokens [R]"""
        for recorded, now in ((self.logits, logits), (self.scores, scores)):
            if recorded is not None:
                for row, one in zip(rows, now.clone(), strict=True):
                    recorded[row].append(one)
        if self.logprobs is not None:
            for row, logprob in zip(rows, logprobs_of(logits, chosen, self.top), strict=True):
                self.logprobs[row].append(logprob)

    def shorten(self, lengths: Sequence[int]) -> None:
        """Keeps the entries of each row's first `lengths[row]` tokens and drops the rest."""
        everything: list[list[list[Any]] | None] = [self.logits, self.scores, self.logprobs]
        for recorded in everything:
            for row, length in zip(recorded or (), lengths, strict=recorded is not None):
                del row[length:]


def logprobs_of(logits: Tensor, chosen: Tensor, top: int) -> list[Logprob]:
    """The `Logprob` of each chosen token [R] by the logits [R, V], with the `top` most likely tokens."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    tops = [tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [Logprob(*one) for one in zip(chosen.tolist(), own, tops, strict=True)]


def _of_prompt(scorer: Scorer, prompt: Sequence[int], row: int) -> list[Logprob | None]:
    """The `Logprob` of each token of a prompt, whose last tokens were fed and scored."""
    own, tops, fed = scorer.own[row].tolist(), scorer.tops(row), scorer.counts[row]
    known = [None if own[i] != own[i] else Logprob(int(scorer.ids[row, i]), own[i], tops[i]) for i in range(fed)]
    return [*[None] * (len(prompt) - fed), *known[max(fed - len(prompt), 0) :]]


# -- trimming ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _without_stop_strings(result: Result) -> Cache:
    """See `Result.trimmed`."""
    given, rows = result.cache, []
    before = result.before or [None] * len(result.tokens)
    for row, (held, new, kept) in enumerate(zip(given.tokens, result.tokens, before, strict=True)):
        start = len(held) - len(new)
        if held[max(start, 0) :] != new:
            raise InputError(f"row {row} of the cache was changed since: it does not end with this result's tokens")
        rows.append(held[: start + (len(new) if kept is None else kept)])
    cache = given.fork()
    try:
        plan = continuation(cache, rows, whole=[True] * len(rows))
    except InputError as error:
        raise InputError(NOT_TRIMMABLE.format(why="tokens were given as embeddings")) from error
    if any(cache.clock.sourced[row] for row in plan.restart):
        raise InputError(NOT_TRIMMABLE.format(why="their source is not kept"))
    plan.apply(cache)
    if any(plan.rest):
        assert cache.model is not None
        prefill(cache.model, from_rows(plan.rest, allow_empty=True), cache)
    return cache
