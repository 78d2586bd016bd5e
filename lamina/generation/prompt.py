"""`Prompt`: the rows of a call, as ids or embeddings padded on the right, made from any form that `generate` accepts.

The forms: a text or texts, ids of one row or of several, a tensor padded on either side with its mask, embeddings, a
chat or chats (lists of messages), and None, which stands for the BOS id. For an encoder–decoder model these are the
source; the decoder's row is the decoder start id followed by `decoder_input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lamina.checkpoint.chat.messages import check_messages, check_text
from lamina.errors import InputError
from lamina.generation.settings.settings import Settings, settings_of

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer
    from lamina.model import Model

FORMS = (
    "text, a list of texts, a list of id lists, a tensor of ids, or a chat (a list of messages with role and content)"
)


@dataclass(frozen=True)
class Prompt:
    """Ids [B, T] or embeddings [B, T, width], of which the first `counts[row]` tokens of each row are real."""

    ids: Tensor | None
    counts: list[int]
    embeds: Tensor | None = None
    known: list[list[int]] | None = None
    """The ids of embedded rows, if they were given too. The embeddings are fed, not these."""
    source: Prompt | None = None
    """The encoder's input, for an encoder–decoder model; the other fields then describe the decoder's row."""
    is_text: bool = False
    """Whether the prompts were given as text, which continues the row of a cache unless `whole=True`."""

    @cached_property
    def rows(self) -> list[list[int]]:
        """Each row's ids; empty for embeddings without ids."""
        if self.ids is not None:
            return [row.tolist() for row in self.arrays]
        return [[] for _ in self.counts] if self.known is None else self.known

    @property
    def arrays(self) -> list[np.ndarray]:
        """Each row's ids as an array; the prompt must be ids."""
        assert self.ids is not None
        ids = self.ids.cpu().numpy()
        return [row[:count] for row, count in zip(ids, self.counts, strict=True)]


def prompt_of(
    model: Model,
    prompts: Any = None,
    attention_mask: Tensor | None = None,
    *,
    inputs_embeds: Tensor | Sequence[Tensor] | None = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Tensor | None = None,
    settings: Settings | None = None,
    add_generation_prompt: bool = True,
    chat_options: Mapping[str, Any] | None = None,
    held: Sequence[int] = (),
    whole: bool | None = None,
) -> Prompt:
    """The `Prompt` for any form of prompts.

    attention_mask         for a tensor of ids or embeddings: 1 for real tokens; padding on the left or the right
    inputs_embeds          [B, T, width] or a list of [T, width], as `model.embed` computes them; `prompts` may name
                           their ids
    decoder_input_ids      ids that follow the start id of an encoder–decoder model's decoder
    add_generation_prompt  whether a chat's prompt ends with the header of the model's answer
    chat_options           further variables of the chat template (tools=, enable_thinking= …); template="name" picks
                           one of several; allow_special=True lets messages spell special tokens (`Tokenizer.chat_ids`)
    held                   tokens in each row of the cache that the prompts continue; empty without a cache. With a
                           cache a prompt may be empty, and prompts=None is an empty prompt for each row. Text for a row
                           that holds tokens is encoded without special tokens, unless `whole` is True. If a cache is
                           given and no source, decoder_input_ids get no start id
    whole                  as in `generate`

    >>> prompt_of(model, [[5, 6], [7]]).counts                       # doctest: +SKIP
    [2, 1]
    """
    settings = settings_of(model, {}) if settings is None else settings
    bare = () if whole else tuple(n > 0 for n in held)
    parser = _Parser(model.tokenizer, add_generation_prompt, chat_options or {}, allow_empty=len(held) > 0, bare=bare)
    given = prompts is not None or inputs_embeds is not None
    if model.start_ids:
        source = (
            _model_input(model, replace(parser, bare=()), prompts, attention_mask, inputs_embeds) if given else None
        )
        begun = (
            None if decoder_input_ids is None else parser.ids(decoder_input_ids, decoder_attention_mask, special=False)
        )
        if held and source is None:
            return begun or empty_rows(len(held))
        return replace(_decoder_rows(source, begun, settings.decoder_start_token_id), source=source)
    if decoder_input_ids is not None or decoder_attention_mask is not None:
        raise InputError(
            f"decoder_input_ids are for encoder–decoder models, and {type(model).__name__} is decoder-only: "
            "put those ids at the end of the prompt"
        )
    if not given:
        if attention_mask is not None:
            raise InputError("an attention_mask was given without a prompt: give the prompt too, or leave it out")
        if held:
            return empty_rows(len(held))
        if settings.bos_token_id is None:
            raise InputError("no prompt was given, and the checkpoint has no BOS id: give a prompt, or bos_token_id")
        return from_rows([[settings.bos_token_id]])
    return _model_input(model, parser, prompts, attention_mask, inputs_embeds)


def _model_input(model: Model, parser: _Parser, prompts: Any, mask: Tensor | None, embeds: Any) -> Prompt:
    """The prompt of a decoder-only model, or the source of an encoder–decoder model."""
    if embeds is None:
        return parser.ids(prompts, mask)
    prompt = _embedded(embeds, mask)
    reads = getattr(model, "encoder", model)
    width = reads.embed(torch.zeros(1, 1, dtype=torch.int64, device=model.device)).shape[-1]
    assert prompt.embeds is not None
    if prompt.embeds.shape[-1] != width:
        raise InputError(
            f"inputs_embeds are {prompt.embeds.shape[-1]} wide, and the model's embeddings are {width} wide: "
            "compute them with model.embed(ids)"
        )
    if prompts is None:
        return prompt
    named = parser.ids(prompts, mask if isinstance(prompts, Tensor) else None)
    if named.counts != prompt.counts:
        raise InputError(
            f"the prompts name {named.counts} ids and inputs_embeds hold {prompt.counts} tokens: "
            "give one id for each, or leave the ids out"
        )
    return replace(prompt, known=named.rows)


def _decoder_rows(source: Prompt | None, begun: Prompt | None, start: int | tuple[int, ...] | None) -> Prompt:
    """The decoder's rows: the ids in `begun`, with the start id in front unless they begin with it."""
    if source is None and begun is None:
        raise InputError(
            "this model reads a source: give a prompt, or decoder_input_ids and a cache that holds its source"
        )
    assert start is not None
    rows = len((source or begun).counts)  # type: ignore[union-attr]
    after: list[list[int]] = [[]] * rows if begun is None else begun.rows
    if len(after) != rows:
        raise InputError(f"decoder_input_ids have {len(after)} rows, the source has {rows}: give one for each")
    starts = (start,) * rows if isinstance(start, int) else start
    if len(starts) != rows:
        raise InputError(f"decoder_start_token_id has {len(starts)} ids for {rows} rows: give one, or one for each")
    return from_rows([row if row[:1] == [one] else [one, *row] for one, row in zip(starts, after, strict=True)])


# -- ids ---------------------------------------------------------------------------------------------------------------


def from_rows(rows: Sequence[Sequence[int] | Tensor], allow_empty: bool = False) -> Prompt:
    """The prompt of id lists of different lengths.

    >>> from_rows([[5, 6], [7]]).ids.tolist()
    [[5, 6], [7, 0]]
    """
    if not rows:
        raise InputError("there are no prompts: give at least one")
    counts = [len(row) for row in rows]
    if 0 in counts and not allow_empty:
        raise InputError(f"prompt {counts.index(0)} is empty: give at least one token")
    ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
    for r, row in enumerate(rows):
        try:
            given = row if isinstance(row, Tensor) else np.array(row)
            values = torch.as_tensor(given) if len(row) else ids[r, :0]
        except (TypeError, ValueError, RuntimeError):
            values = torch.zeros(())
        if values.dim() != 1 or values.is_floating_point() or values.dtype == torch.bool:
            raise InputError(f"prompt {r} must be a list of ids, whole numbers, not {_short(row)}")
        ids[r, : len(row)] = values
    return Prompt(ids, counts)


def empty_rows(rows: int) -> Prompt:
    """A prompt of `rows` rows without tokens."""
    return from_rows([[]] * rows, allow_empty=True)


def from_padded(ids: Tensor, attention_mask: Tensor | None = None, allow_empty: bool = False) -> Prompt:
    """The prompt of an id tensor [B, T] that is padded on the left or the right, with its mask (1 = real).

    >>> from_padded(torch.tensor([[0, 5], [6, 7]]), torch.tensor([[0, 1], [1, 1]])).rows
    [[5], [6, 7]]
    """
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2:
        raise InputError(f"prompt ids must be [B, T] or [T], not {list(ids.shape)}")
    if ids.is_floating_point():
        raise InputError(f"prompt ids must be whole numbers, not {ids.dtype}: give embeddings as inputs_embeds")
    rows = ids.cpu()
    if attention_mask is None:
        return from_rows(list(rows), allow_empty)
    real = _real_ranges(attention_mask, ids.shape, "ids")
    return from_rows([row[first:end] for row, (first, end) in zip(rows, real, strict=True)], allow_empty)


def _real_ranges(mask: Tensor, shape: torch.Size, what: str) -> list[tuple[int, int]]:
    """The range (start, end) of real tokens in each row of a mask [B, T]."""
    mask = torch.as_tensor(mask)
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != shape[:2]:
        raise InputError(f"attention_mask is {list(mask.shape)}, the {what} are {list(shape[:2])}: give the same shape")
    found = []
    for r, row in enumerate(mask.cpu().bool()):
        real = row.nonzero()[:, 0].tolist()
        if real and real[-1] - real[0] + 1 != len(real):
            raise InputError(f"the attention_mask of row {r} has a gap: padding belongs on the left or the right")
        found.append((real[0], real[-1] + 1) if real else (0, 0))
    return found


@dataclass(frozen=True)
class _Parser:
    """Converts prompts in any form but embeddings into ids."""

    tokenizer: Tokenizer | None
    add_generation_prompt: bool
    chat_options: Mapping[str, Any]
    allow_empty: bool
    bare: tuple[bool, ...] = ()
    """Per row of the cache, True if its text is encoded without special tokens; one entry stands for all rows. Empty:
    every text gets special tokens."""

    def ids(self, prompts: Any, mask: Tensor | None = None, special: bool = True) -> Prompt:
        """The prompt of `prompts`. special: whether texts get special tokens, unless `bare` says no"""
        if isinstance(prompts, np.ndarray):
            prompts = torch.as_tensor(prompts)
        if isinstance(prompts, Tensor):
            return from_padded(prompts, mask, self.allow_empty)
        if mask is not None:
            raise InputError("an attention_mask belongs to a tensor of ids; lists of ids and texts need none")
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence) or not prompts:
            raise InputError(f"prompts must be {FORMS}, not {_short(prompts)}")
        kinds = list(dict.fromkeys(kind for one in prompts if (kind := _kind(one)) != "nothing")) or ["ids"]
        if len(kinds) > 1:
            raise InputError(f"prompts are {' and '.join(kinds)} in one list: give all of them in one form, {FORMS}")
        match kinds[0]:
            case "text":
                bare = self.bare * len(prompts) if len(self.bare) == 1 else self.bare
                if len(bare) != len(prompts):  # no cache, or a wrong number of prompts, which is refused later
                    bare = (False,) * len(prompts)
                rows = [
                    self._tokens(n, text or "", special and not is_bare)
                    for n, (text, is_bare) in enumerate(zip(prompts, bare, strict=True))
                ]
                return replace(from_rows(rows, self.allow_empty), is_text=True)
            case "a message":
                prompts = [self._chat(prompts)]
            case "messages":
                prompts = [self._chat(chat, f"prompt {n}: ") for n, chat in enumerate(prompts)]
            case "an id":
                prompts = [prompts]
            case "ids":
                pass
            case other:
                raise InputError(f"prompts must be {FORMS}, not a list that holds {other}")
        return from_rows(prompts, self.allow_empty)

    def _tokens(self, index: int, text: str, special: bool) -> list[int]:
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer: give lists of ids instead of text")
        check_text(text, f"prompt {index}")
        return self.tokenizer.encode(text, special)

    def _chat(self, messages: Sequence[Mapping[str, Any]], where: str = "") -> list[int]:
        try:
            check_messages(messages)
        except InputError as error:
            raise InputError(f"{where}{error}") from None
        if self.tokenizer is None:
            raise InputError(
                "this checkpoint has no tokenizer and no chat template: give lists of ids instead of messages"
            )
        options = {"add_generation_prompt": self.add_generation_prompt, **self.chat_options}
        return self.tokenizer.chat_ids(messages, **options)


def _kind(one: Any) -> str:
    """The form of one element of a list of prompts, in words."""
    if isinstance(one, str):
        return "text"
    if isinstance(one, Mapping):
        return "a message"
    if isinstance(one, Integral) or (isinstance(one, Tensor | np.ndarray) and one.ndim == 0):
        return "an id"
    if isinstance(one, Tensor | np.ndarray):
        return "ids"
    if not isinstance(one, Sequence):
        return f"a {type(one).__name__}"
    if not one:
        return "nothing"
    return "messages" if isinstance(one[0], Mapping) else "ids" if isinstance(one[0], Integral) else _kind(one[0]) + "s"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


# -- embeddings --------------------------------------------------------------------------------------------------------


def _embedded(embeds: Tensor | Sequence[Tensor], mask: Tensor | None) -> Prompt:
    """The prompt of embeddings, padded with zeros. mask: for a tensor"""
    if isinstance(embeds, Tensor):
        embeds = embeds[None] if embeds.dim() == 2 else embeds
        if embeds.dim() != 3 or 0 in embeds.shape:
            raise InputError(f"inputs_embeds must be [B, T, width] with at least one token, not {list(embeds.shape)}")
        if mask is None:
            return Prompt(None, [embeds.shape[1]] * embeds.shape[0], embeds)
        real = _real_ranges(mask, embeds.shape, "inputs_embeds")
        rows = [row[first:end] for row, (first, end) in zip(embeds, real, strict=True)]
    else:
        if mask is not None:
            raise InputError("an attention_mask belongs to a tensor; a list of inputs_embeds needs none")
        rows = list(embeds)
    if not rows or any(not isinstance(row, Tensor) or row.dim() != 2 for row in rows):
        raise InputError("inputs_embeds must be a tensor [B, T, width] or a list of tensors [T, width]")
    if len(widths := {row.shape[1] for row in rows}) > 1:
        raise InputError(f"inputs_embeds must be of one width, not of {sorted(widths)}")
    counts = [len(row) for row in rows]
    if 0 in counts:
        raise InputError(f"prompt {counts.index(0)} is empty: give at least one token")
    return Prompt(None, counts, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
