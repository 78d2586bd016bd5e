"""Drafts: guesses at how rows go on, which speculation.py checks in one pass of the model.

A draft may be as wrong as it likes: what is made of it is right in any case, so all it decides is how fast. Three kinds
are here: `Lookup` finds the row's last tokens earlier in the row and guesses what followed them there; `Assistant` runs
a cheaper model; and `early_exit` makes such a model of the first layers of the one that is checked against. A cheaper
model with another tokenizer is run by `UniversalAssistant` (universal.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from lamina.cache.clock import on_device
from lamina.cache.layers.cross import Source
from lamina.errors import InputError
from lamina.generation.feed import Reader
from lamina.generation.run import Run

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.model import Model

DRAWING = 1
"""The stream of the noise that guesses are drawn with; the model's own draws have stream 0."""
MOST_GROWN = 32  # a draft that learns grows up to here, or stays at the length it was given


@dataclass
class Guess:
    """tokens: for each row that was asked for; none is a fine answer.

    scores   [R, K, V] the processed scores that they were drawn from; None where no chance was involved
    """

    tokens: list[list[int]]
    scores: Tensor | None = None


class Draft(Protocol):
    """draft(rows, texts, most): guesses for some rows of the run.

    texts   what each of them holds, prompt and new tokens; the model has not read the last one yet
    most    how many tokens each may get
    """

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess: ...


class Schedule:
    """How many tokens are drafted for each row.

    "constant": always the same. "heuristic": two more after a draft that was right to its end, one fewer after another;
    every call starts anew, so "heuristic_transient" is the same.
    """

    def __init__(self, rows: int, start: int, kind: str = "constant") -> None:
        kinds = ("constant", "heuristic", "heuristic_transient")
        if kind not in kinds:
            raise InputError(f"num_assistant_tokens_schedule must be one of {', '.join(kinds)}, not {kind!r}")
        if start < 1:
            raise InputError(f"a draft must be at least 1 token long, not {start}")
        self.learns = kind != "constant"
        self.most = max(start, MOST_GROWN) if self.learns else start
        self.lengths = [start] * rows

    def learn(self, row: int, drafted: int, accepted: int) -> None:
        if self.learns and drafted:
            length = self.lengths[row] + 2 if accepted == drafted else self.lengths[row] - 1
            self.lengths[row] = min(max(length, 1), self.most)


class Lookup:
    """Guesses that a row repeats itself: what followed the first place where its last `longest` tokens stand, or, where
    they stand nowhere else, its last `longest - 1` …"""

    def __init__(self, longest: int = 2) -> None:
        if longest < 1:
            raise InputError(f"max_matching_ngram_size must be at least 1, not {longest}")
        self.longest = longest
        self.ends: dict[int, dict[tuple[int, ...], int]] = {}  # row -> tokens in a run -> where they first end
        self.read: dict[int, int] = {}  # row -> up to where its runs are in there

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess:
        return Guess([self._guess(*one) for one in zip(rows, texts, most, strict=True)])

    def _guess(self, row: int, text: Sequence[int], most: int) -> list[int]:
        ends = self.ends.setdefault(row, {})
        for end in range(self.read.get(row, 1), len(text)):  # all that something follows
            for n in range(1, min(self.longest, end) + 1):
                ends.setdefault(tuple(text[end - n : end]), end)
        self.read[row] = len(text)
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            if found := ends.get(tuple(text[-n:])):
                return list(takewhile(lambda token: token >= 0, text[found : found + most]))  # -1: an embedding
        return []


class Assistant:
    """The guesses of a model that is cheaper to run, each chosen as the run chooses, from its own scores.

    Its cache is its own. It reads its guesses one by one as it makes them, so what turned out wrong is taken back
    before the next draft; `most` says how long a draft may be, and so how much slack that needs. A draft ends with the
    first token that has a probability below `threshold`. That token stays: leaving it out would be a choice by what was
    drawn, and the tokens made of such drafts would not have the model's distribution.

    Its ids mean what the model's do, but its table may be longer or shorter: ids past its end are never guessed, and
    are read as its last one.
    """

    def __init__(self, run: Run, model: Model, most: int, threshold: float | None = None) -> None:
        refuse_embeddings(run)
        self.run, self.model, self.threshold = run, model, threshold or 0.0
        self.cache = model.new_cache(run.cache.rows, slack=most - 1, source=_source(run, model))
        ends = (self.cache.limit, None if run.settings.beyond_context else model.context)
        self.longest = min((n for n in ends if n is not None), default=None)  # tokens that it may read
        self.reader = Reader(model, self.cache)
        self.guessed: dict[int, tuple[int, list[int]]] = {}  # row -> where its last guesses began, those it has read

    @torch.no_grad()
    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Guess:
        self._take_back(rows, texts)
        if self.longest is not None:
            most = [min(n, self.longest - len(text) + 1) for n, text in zip(most, texts, strict=True)]
        going = [i for i, n in enumerate(most) if n > 0]  # indices into `rows`
        if not going:
            return Guess([[] for _ in rows])
        chooser, device, vocab = self.run.chooser, self.run.logits.device, self.run.model.vocab
        tokens = torch.full((len(rows), max(most)), -1, device=device)
        kept = torch.zeros(*tokens.shape, vocab, device=device) if chooser.sample else None
        history = self.run.history([rows[i] for i in going])
        history = history.and_then(on_device([texts[i][-1] for i in going], device)[:, None])
        logits = self._read([rows[i] for i in going], [texts[i] for i in going])
        for k in range(max(most)):
            at = on_device(going, device)
            scores = chooser.scores(_as_wide(logits.to(device), vocab), history)
            numbers = on_device([self.run.numbers[rows[i]] for i in going], device)
            chosen = chooser.choose(scores, numbers, history.lengths, DRAWING)
            tokens[at, k] = chosen
            if kept is not None:
                kept[at, k] = scores
            sure = self._sure(scores, chosen)
            left = [n for n, i in enumerate(going) if sure[n] and most[i] > k + 1]
            if not left:
                break
            going, index = [going[n] for n in left], on_device(left, device)
            history = history.take(left).and_then(chosen[index, None])
            ids = chosen[index, None].clamp(max=self.model.vocab - 1).to(self.cache.device)
            logits = self.reader.read_all(ids, [rows[i] for i in going])
        guessed = [[token for token in row if token >= 0] for row in tokens.tolist()]
        for row, text, guess in zip(rows, texts, guessed, strict=True):
            self.guessed[row] = (len(text), guess[:-1])
        return Guess(guessed, kept)

    def _sure(self, scores: Tensor, chosen: Tensor) -> list[bool]:
        if not self.threshold:
            return [True] * len(chosen)
        return (scores.softmax(dim=-1).gather(1, chosen[:, None])[:, 0] >= self.threshold).tolist()

    def _take_back(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Drops the guesses that the rows did not go on with."""
        back = [0] * self.cache.rows
        for row, text in zip(rows, texts, strict=True):
            start, guessed = self.guessed.pop(row, (0, []))
            pairs = zip(guessed, text[start:-1], strict=False)  # the last token is to be read in any case
            back[row] = len(guessed) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if any(back):
            self.cache.rewind(back)

    def _read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Reads what of these rows it has not read yet: the prompt at first, then what was made. -> logits [R, V]"""
        last = self.model.vocab - 1
        unread = [
            [min(id, last) for id in text[self.cache.clock.high[row] :]] for row, text in zip(rows, texts, strict=True)
        ]
        return self.reader.read_rows(unread, rows, self.run.settings.prefill_chunk)


def _as_wide(logits: Tensor, vocab: int) -> Tensor:
    """logits [R, V] of a table that is longer or shorter -> [R, vocab].

    Ids that it does not have are impossible, but finite: a processor may leave no others.
    """
    missing = vocab - logits.shape[-1]
    return logits if not missing else torch.nn.functional.pad(logits.float(), (0, missing), value=-1e30)


def early_exit(model: Model, layers: int) -> Model:
    """The first layers of a model between its embedding and its head, as a model of its own. It shares all weights."""
    if not 0 < layers < len(model.blocks):
        raise InputError(
            f"assistant_early_exit={layers}: the model has {len(model.blocks)} layers, so it must be between 1 and "
            f"{len(model.blocks) - 1}"
        )
    with _making_exits:
        exits: dict[int, Model] = model.__dict__.setdefault("_exits", {})
        shared = {name: value for name, value in model.__dict__.items() if name not in ("_graphs", "_exits")}
        modules = {**model._modules, "blocks": model.blocks[:layers]}
        shared |= {"_modules": modules, "compiled": None}
        known = exits.get(layers)
        if known is None or not _same(known.__dict__, shared):  # its captured passes serve the next call too
            known = exits[layers] = object.__new__(type(model))
            known.__dict__.update(shared)
        return known


_making_exits = Lock()


def _same(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a model that was made of these attributes would be made of the same now."""
    for name, value in now.items():
        old = known.get(name)
        if name == "_modules":
            if old is None or list(old) != list(value) or list(old["blocks"]) != list(value["blocks"]):
                return False
            if any(old[part] is not value[part] for part in value if part != "blocks"):
                return False
        elif old is not value:
            return False
    return True


def draft_of(run: Run) -> tuple[Draft, Schedule]:
    """What the settings ask for."""
    s, rows = run.settings, run.cache.rows
    if s.prompt_lookup_num_tokens is not None:
        return Lookup(s.max_matching_ngram_size), Schedule(rows, s.prompt_lookup_num_tokens)
    schedule = Schedule(rows, s.num_assistant_tokens, s.num_assistant_tokens_schedule)
    assistant, threshold = assistant_of(run.model, s), s.assistant_confidence_threshold
    if same_ids(run.model, assistant):
        return Assistant(run, assistant, schedule.most, threshold), schedule
    from lamina.generation.strategies.universal import UniversalAssistant

    return UniversalAssistant(run, assistant, schedule.most, threshold), schedule


def assistant_of(model: Model, settings: Settings) -> Model:
    """The model that guesses: the assistant, or the first layers of the model itself."""
    assistant = settings.assistant_model
    if assistant is None:
        if settings.assistant_early_exit is None:
            raise InputError("speculation needs assistant_model, prompt_lookup_num_tokens or assistant_early_exit")
        return early_exit(model, settings.assistant_early_exit)
    same_ids(model, assistant)
    return assistant


def same_ids(model: Model, assistant: Model) -> bool:
    """Whether an id is the same token for both; if not, guesses go by way of text, which needs two tokenizers."""
    if model.tokenizer is not None and assistant.tokenizer is not None:
        return model.tokenizer.same_ids(assistant.tokenizer)
    if assistant.vocab == model.vocab:  # nothing says that they differ
        return True
    without = [name for name, one in (("model", model), ("assistant", assistant)) if one.tokenizer is None]
    raise InputError(
        f"the assistant has a vocabulary of {assistant.vocab} ids and the model one of {model.vocab}, and without a "
        f"tokenizer of the {' and of the '.join(without)} guesses cannot be handed over as text: set .tokenizer there, "
        "give an assistant with the same vocabulary, or use prompt_lookup_num_tokens, which needs none"
    )


def refuse_embeddings(run: Run) -> None:
    """An assistant reads ids."""
    for row, text in enumerate(run.cache.tokens):
        if -1 in text:
            raise InputError(
                f"row {row} holds embeddings, which an assistant that reads ids cannot follow: give ids, or use "
                "prompt_lookup_num_tokens"
            )


def source_ids(run: Run, model: Model) -> Tensor:
    """[B, E] the ids of the run's source, -1 past their end, for an assistant that reads one."""
    if run.source is None:
        raise InputError(
            f"the assistant is a {type(model).__name__}, which reads a source, and there are no source ids: use an "
            "assistant of the model's own kind, or prompt_lookup_num_tokens"
        )
    return run.source


def _source(run: Run, model: Model) -> Source | None:
    """What an assistant that reads a source makes of the run's."""
    if not model.start_ids:
        return None
    source = source_ids(run, model)
    return model.encode(source.clamp(0, model.vocab - 1), (source >= 0).sum(dim=1).tolist())
