"""Drafters for speculative decoding: they propose the next tokens of rows, which speculation.py verifies in one pass.

A draft affects only speed: the accepted tokens are right whatever the draft is. `PromptLookup` finds the row's last
tokens earlier in the row and proposes the tokens that followed them there. `Assistant` runs a smaller model;
`early_exit` makes one from the first layers of the model itself. A smaller model with another tokenizer is run by
`CrossTokenizerAssistant` (cross_tokenizer.py).
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
from lamina.cache.ops.attach import attach_like
from lamina.errors import InputError
from lamina.generation.feed import Reader
from lamina.generation.run import Run

if TYPE_CHECKING:
    from lamina.generation.settings.settings import Settings
    from lamina.model import Model

DRAFT_STREAM = 1
"""The noise stream for drawing draft tokens; the model's own draws use stream 0."""
MOST_GROWN = 32  # the heuristic schedule grows drafts up to this length, or the given one if that is larger


@dataclass
class Draft:
    """Proposed tokens for each of R rows; a row may have none.

    scores   [R, K, V] the processed scores that the tokens were drawn from; None if they were not drawn
    """

    tokens: list[list[int]]
    scores: Tensor | None = None


class Drafter(Protocol):
    """drafter(rows, texts, most) -> a draft for these rows of the run.

    texts   ids of each row, prompt and new tokens; the model has not been fed the last one yet
    most    draft tokens that each row may get
    """

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft: ...


class DraftLengths:
    """The length of the next draft of each row.

    "constant": always the same. "heuristic": two more after a draft that was accepted whole, one fewer otherwise. Every
    call starts with the given length, so "heuristic_transient" is the same.
    """

    def __init__(self, rows: int, start: int, kind: str = "constant") -> None:
        kinds = ("constant", "heuristic", "heuristic_transient")
        if kind not in kinds:
            raise InputError(f"num_assistant_tokens_schedule must be one of {', '.join(kinds)}, not {kind!r}")
        if start < 1:
            raise InputError(f"a draft must be at least 1 token long, not {start}")
        self.varies = kind != "constant"
        self.most = max(start, MOST_GROWN) if self.varies else start
        self.lengths = [start] * rows

    def update(self, row: int, drafted: int, accepted: int) -> None:
        """Sets the length of a row's next draft by how many tokens of the last one were accepted."""
        if self.varies and drafted:
            length = self.lengths[row] + 2 if accepted == drafted else self.lengths[row] - 1
            self.lengths[row] = min(max(length, 1), self.most)


class PromptLookup:
    """Drafts that a row repeats itself: finds the first occurrence of its last n tokens and proposes the tokens that
    followed. n is `longest`, or the largest smaller n for which there is an earlier occurrence."""

    def __init__(self, longest: int = 2) -> None:
        if longest < 1:
            raise InputError(f"max_matching_ngram_size must be at least 1, not {longest}")
        self.longest = longest
        self.ends: dict[int, dict[tuple[int, ...], int]] = {}  # row -> n-gram -> the index after its first occurrence
        self.indexed: dict[int, int] = {}  # row -> the tokens whose n-grams are in `ends`

    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        return Draft([self._draft(*one) for one in zip(rows, texts, most, strict=True)])

    def _draft(self, row: int, text: Sequence[int], most: int) -> list[int]:
        ends = self.ends.setdefault(row, {})
        for end in range(self.indexed.get(row, 1), len(text)):  # n-grams that a token follows
            for n in range(1, min(self.longest, end) + 1):
                ends.setdefault(tuple(text[end - n : end]), end)
        self.indexed[row] = len(text)
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            if found := ends.get(tuple(text[-n:])):
                return list(takewhile(lambda token: token >= 0, text[found : found + most]))  # -1: an embedding
        return []


class Assistant:
    """Drafts by a smaller model, which chooses tokens from its own scores with the run's chooser.

    It has its own cache and is fed its draft tokens one by one; rejected ones are rewound before the next draft. `most`
    is the maximum length of a draft, which determines the slack that rewinding needs. A draft ends with the first token
    whose probability is below `threshold`. That token is kept: dropping it would select drafts by what was drawn, and
    the accepted tokens would no longer have the model's distribution.

    Its ids mean the same tokens as the model's, but its vocabulary may be longer or shorter. Ids that it does not have
    are never drafted, and are fed to it as its last id.
    """

    def __init__(self, run: Run, model: Model, most: int, threshold: float | None = None) -> None:
        refuse_embeddings(run.cache.tokens)
        self.run, self.model, self.threshold = run, model, threshold or 0.0
        own_layers = run.settings.assistant_model is None
        source = None if own_layers else _source(run, model)
        self.cache = model.new_cache(run.cache.rows, slack=most - 1, source=source)
        if own_layers and model.start_ids:
            attach_like(self.cache, run.cache)
        ends = (self.cache.limit, None if run.settings.beyond_context else model.context)
        self.longest = min((n for n in ends if n is not None), default=None)  # tokens of a row that it may be fed
        self.reader = Reader(model, self.cache)
        # row -> where its last draft began, and the tokens of it that the cache holds
        self.drafted: dict[int, tuple[int, list[int]]] = {}

    @torch.no_grad()
    def __call__(self, rows: Sequence[int], texts: Sequence[Sequence[int]], most: Sequence[int]) -> Draft:
        self._rewind_rejected(rows, texts)
        if self.longest is not None:
            most = [min(n, self.longest - len(text) + 1) for n, text in zip(most, texts, strict=True)]
        going = [i for i, n in enumerate(most) if n > 0]  # indices into `rows`
        if not going:
            return Draft([[] for _ in rows])
        chooser, device, vocab = self.run.chooser, self.run.logits.device, self.run.model.vocab
        tokens = torch.full((len(rows), max(most)), -1, device=device)
        drawn_from = torch.zeros(*tokens.shape, vocab, device=device) if chooser.sample else None
        history = self.run.history([rows[i] for i in going])
        history = history.and_then(on_device([texts[i][-1] for i in going], device)[:, None])
        logits = self._read([rows[i] for i in going], [texts[i] for i in going])
        for k in range(max(most)):
            at = on_device(going, device)
            scores = chooser.scores(_as_wide(logits.to(device), vocab), history)
            row_ids = on_device([self.run.row_ids[rows[i]] for i in going], device)
            chosen = chooser.choose(scores, row_ids, history.lengths, DRAFT_STREAM)
            tokens[at, k] = chosen
            if drawn_from is not None:
                drawn_from[at, k] = scores
            confident = self._confident(scores, chosen)
            left = [n for n, i in enumerate(going) if confident[n] and most[i] > k + 1]
            if not left:
                break
            going, index = [going[n] for n in left], on_device(left, device)
            history = history.take(left).and_then(chosen[index, None])
            ids = chosen[index, None].clamp(max=self.model.vocab - 1).to(self.cache.device)
            logits = self.reader.read_all(ids, [rows[i] for i in going])
        drafts = [[token for token in row if token >= 0] for row in tokens.tolist()]
        for row, text, draft in zip(rows, texts, drafts, strict=True):
            self.drafted[row] = (len(text), draft[:-1])
        return Draft(drafts, drawn_from)

    def _confident(self, scores: Tensor, chosen: Tensor) -> list[bool]:
        """Whether the probability of each chosen token [R] by the scores [R, V] reaches the threshold."""
        if not self.threshold:
            return [True] * len(chosen)
        return (scores.softmax(dim=-1).gather(1, chosen[:, None])[:, 0] >= self.threshold).tolist()

    def _rewind_rejected(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Rewinds the cache by the draft tokens that were rejected."""
        back = [0] * self.cache.rows
        for row, text in zip(rows, texts, strict=True):
            start, drafted = self.drafted.pop(row, (0, []))
            pairs = zip(drafted, text[start:-1], strict=False)  # the last token is fed in any case, for its logits
            back[row] = len(drafted) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if any(back):
            self.cache.rewind(back)

    def _read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Feeds the tokens of these rows that the cache does not hold. -> logits after the last [R, V]"""
        last = self.model.vocab - 1
        unread = [
            [min(id, last) for id in text[self.cache.clock.high[row] :]] for row, text in zip(rows, texts, strict=True)
        ]
        return self.reader.read_rows(unread, rows, self.run.settings.prefill_chunk)


def _as_wide(logits: Tensor, vocab: int) -> Tensor:
    """Logits [R, V] of a longer or shorter vocabulary -> [R, vocab].

    Missing ids get a very low but finite logit: processors may exclude all others.
    """
    missing = vocab - logits.shape[-1]
    return logits if not missing else torch.nn.functional.pad(logits.float(), (0, missing), value=-1e30)


def early_exit(model: Model, layers: int) -> Model:
    """A model of the first `layers` layers of a model between its embedding and its head. It shares all weights."""
    if len(model.blocks) == 1:
        raise InputError(
            f"assistant_early_exit={layers}: {type(model).__name__} is a single block, so there are no first layers: "
            "use assistant_model or prompt_lookup_num_tokens"
        )
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
        if known is None or not _same(known.__dict__, shared):  # else reused, with its captured passes
            known = exits[layers] = object.__new__(type(model))
            known.__dict__.update(shared)
        return known


_making_exits = Lock()


def _same(known: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether these attributes of a model, but for captured passes, are the same objects as before."""
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


def assistant_of(model: Model, settings: Settings) -> Model:
    """The model that drafts: the assistant, or the first layers of the model itself."""
    assistant = settings.assistant_model
    if assistant is None:
        if settings.assistant_early_exit is None:
            raise InputError("speculation needs assistant_model, prompt_lookup_num_tokens or assistant_early_exit")
        return early_exit(model, settings.assistant_early_exit)
    same_ids(model, assistant)
    return assistant


def same_ids(model: Model, assistant: Model) -> bool:
    """Whether an id is the same token for both. If not, drafts are converted through text, which needs two
    tokenizers."""
    if model.tokenizer is not None and assistant.tokenizer is not None:
        return model.tokenizer.same_ids(assistant.tokenizer)
    if assistant.vocab == model.vocab:  # nothing says that they differ
        return True
    without = [name for name, one in (("model", model), ("assistant", assistant)) if one.tokenizer is None]
    raise InputError(
        f"the assistant has a vocabulary of {assistant.vocab} ids and the model one of {model.vocab}, and without a "
        f"tokenizer of the {' and of the '.join(without)} drafts cannot be converted through text: set .tokenizer "
        "there, give an assistant with the same vocabulary, or use prompt_lookup_num_tokens, which needs none"
    )


def refuse_embeddings(texts: Sequence[Sequence[int]]) -> None:
    """Raises if a row, of which these are the ids, holds embeddings, which an assistant cannot be fed."""
    for row, text in enumerate(texts):
        if -1 in text:
            raise InputError(
                f"row {row} holds embeddings, and an assistant is fed ids: give ids, or use prompt_lookup_num_tokens"
            )


def check_source_ids(source: Tensor | None, assistant: Model) -> None:
    """Raises if an assistant with an encoder would have no source ids to read."""
    if source is None and assistant.start_ids:
        raise InputError(
            f"the assistant is a {type(assistant).__name__}, which reads a source, and there are no source ids: give "
            "the source's ids as the prompt, or use assistant_early_exit or prompt_lookup_num_tokens, which need none"
        )


def source_ids(run: Run, model: Model) -> Tensor:
    """[B, E] the ids of the run's source, padded with -1, for an assistant with an encoder."""
    check_source_ids(run.source_ids, model)
    assert run.source_ids is not None
    return run.source_ids


def _source(run: Run, model: Model) -> Source | None:
    """The assistant's encoding of the run's source; None for a decoder-only assistant."""
    if not model.start_ids:
        return None
    source = source_ids(run, model)
    return model.encode(source.clamp(0, model.vocab - 1), (source >= 0).sum(dim=1).tolist())
