"""What a call of generate returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.cache.cache import Cache
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import InputError
from lamina.generation.introspect import Inside
from lamina.generation.kept import Kept, Logprob

if TYPE_CHECKING:
    from lamina.generation.prompt import Prompt
    from lamina.generation.run import Made, Run
    from lamina.generation.settings.settings import Settings
    from lamina.generation.strategies.speculation import Speculated
    from lamina.model import Model

SHOWN_ROWS, SHOWN_TOKENS, SHOWN_LETTERS = 3, 8, 60  # what `print(result)` shows at most


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


@dataclass(repr=False)
class Result:
    """A row for each sequence: `num_return_sequences` rows for each prompt, one after the other."""

    prompts: list[list[int]]
    """The ids of each row's prompt, as far as they are known."""
    tokens: list[list[int]]
    """The new ids of each row, the one that ended it included."""
    reasons: list[str]
    """Why each row ended: "eos", "length", "context" (it holds as many tokens as the model has positions), "stop" or
    "time"; in `error.result` also "pages" or "capacity" where there was no room."""
    reused: list[int] = field(default_factory=list)
    """How many tokens of each prompt the given cache or the prefix store already held."""
    how: str = ""
    """How tokens were decoded, and where a fast path was not taken, why."""
    timing: Timing = field(default_factory=Timing)
    tokenizer: Tokenizer | None = None
    pad_id: int = 0
    before: list[int | None] = field(default_factory=list)
    """How many of each row's new tokens end before the stop string that ended it."""
    row_ids: list[int] = field(default_factory=list)
    """The numbers that draws depended on: with `cache=result.cache, row_ids=result.row_ids` and the same seed, sampling
    goes on as if it had never stopped. Without them, a continued row draws as its whole text would as a prompt."""
    _cuts: list[int | None] = field(default_factory=list)  # where in each row's text its stop string begins
    _cache: Cache | None = None
    _recorded: Kept | None = None  # logits, scores and log-probabilities that were asked for
    _inside: Inside | None = None  # hidden states and attentions that were asked for
    _extra: dict[str, Any] = field(default_factory=dict)  # results of one strategy, by name: see `Made.more`

    @classmethod
    def of(
        cls, model: Model, settings: Settings, prompt: Prompt, made: Made, run: Run, reused: Sequence[int],
        timing: Timing,
    ) -> Result:  # fmt: skip
        times = len(made.tokens) // len(prompt.counts)
        each = [row for row in range(len(prompt.counts)) for _ in range(times)]
        rows, stopping = prompt.rows, run.stopping
        return cls(
            [rows[row] for row in each], made.tokens, made.reasons, [reused[row] for row in each], made.how, timing,
            model.tokenizer, settings.pad_token_id, stopping.before, run.numbers, stopping.cuts,
            made.cache if settings.use_cache else None, run.kept, _extra=made.more,
        )  # fmt: skip

    def __repr__(self) -> str:
        """How many rows, and of the first few how many new tokens, why each ended and how it begins.

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
        """Holds every row's prompt and new tokens, ready to be continued. The tokens of a stop string are among them,
        though `text` ends before it: `trimmed()` is without them."""
        if self._cache is None:
            raise InputError("use_cache=False keeps nothing: generate with a cache to have one to continue")
        return self._cache

    def trimmed(self) -> Cache:
        """A copy of the cache whose rows end before the stop string that ended them, as `text` does. A token that holds
        the end of the text and the beginning of the stop string goes whole.

        A row that cannot be taken back so far (sliding windows and recurrent states, without slack) is read anew from
        its ids. The copy costs the memory of the rows, in a pool none.

        >>> result = model.generate("Q: Why?\\nA:", stop_strings="\\nQ:")         # doctest: +SKIP
        >>> model.generate("\\nThanks!", cache=result.trimmed())                 # doctest: +SKIP
        """
        from lamina.generation.trim import trimmed

        return trimmed(self)

    @property
    def text(self) -> list[str]:
        """The new text of each row, up to the stop string where one ended it."""
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
        """Of each row, what its tokens were chosen from [n, V]; with output_scores=True."""
        return self._stacked("scores")

    @property
    def logits(self) -> list[Tensor]:
        """Of each row, what the model gave [n, V]; with output_logits=True."""
        return self._stacked("logits")

    @property
    def logprobs(self) -> list[list[Logprob]]:
        """Of each row, the log-probabilities of its tokens; with logprobs=n."""
        if self._recorded is None or self._recorded.logprobs is None:
            raise InputError("log-probabilities were not kept: generate with logprobs=0, or =5 for the five best too")
        return self._recorded.logprobs

    @property
    def hidden_states(self) -> list[list[Tensor]]:
        """Of each row, the hidden states of prompt and new tokens, layer by layer [tokens, width]; with
        output_hidden_states=True."""
        return self._states("hidden")

    @property
    def attentions(self) -> list[dict[tuple[int, str], Tensor]]:
        """Of each row, how much each token takes of each, by layer and entry [heads, tokens, keys]; with
        output_attentions=True."""
        return self._states("attentions")

    @property
    def speculation(self) -> Speculated:
        """How many tokens were drafted and accepted, by row; with drafts (`prompt_lookup_num_tokens=` or others)."""
        return self._of_strategy("speculation", "generate with prompt_lookup_num_tokens=8 or an assistant_model")

    @property
    def sequences_scores(self) -> list[float]:
        """Of each row, the sum of its log-probabilities, divided as `length_penalty` says; with num_beams."""
        return self._of_strategy("sequences_scores", "generate with num_beams=4 or another number of beams")

    @property
    def beam_indices(self) -> list[list[int]]:
        """Of each row, the beam that each token continued: prompt · num_beams + rank; with num_beams."""
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
