"""Prompts: every form, what it becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.generation.prompt import Prompt, prompt_of
from lamina.generation.settings.settings import settings_of
from lamina.model import Model
from tests.families import test_t5
from tests.families.cases import FIRST
from tests.families.harness import TOLERANCE, pair, relative
from tests.generation.text import reader, tokenizer

ROWS = [[5, 9, 12, 3], [7], [30, 31]]
CHAT = [{"role": "user", "content": "the thing"}]


@pytest.fixture(scope="module")
def model() -> Model:
    return reader()


def padded(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    ids, mask = torch.full((len(rows), 6), 66), torch.zeros(len(rows), 6, dtype=torch.int64)
    for r, row in enumerate(rows):
        place = slice(6 - len(row), 6) if left else slice(0, len(row))
        ids[r, place], mask[r, place] = torch.tensor(row), 1
    return ids, mask


def test_ids_in_every_form_are_the_same_rows(model: Model) -> None:
    forms: list[Any] = [
        ROWS,
        tuple(map(tuple, ROWS)),
        [torch.tensor(row) for row in ROWS],
        [np.array(row) for row in ROWS],
        [[np.int64(i) for i in row] for row in ROWS],
    ]
    for form in forms:
        found = prompt_of(model, form)
        assert (found.rows, found.counts) == (ROWS, [4, 1, 2])
        assert found.ids is not None and found.ids.tolist() == [[5, 9, 12, 3], [7, 0, 0, 0], [30, 31, 0, 0]]
    for left in (True, False):
        assert prompt_of(model, *padded(ROWS, left)).rows == ROWS
    for one in ([5, 6], torch.tensor([5, 6]), np.array([[5, 6]]), [torch.tensor(5), torch.tensor(6)]):
        assert prompt_of(model, one).rows == [[5, 6]]


def test_texts_and_chats_are_what_the_tokenizer_makes_of_them(model: Model) -> None:
    assert prompt_of(model, "the theory").rows == [tokenizer().encode("the theory")]
    assert prompt_of(model, ["a", "thing"]).rows == [tokenizer().encode(text) for text in ("a", "thing")]
    asked = tokenizer().encode("<|im_start|>user\nthe thing<|im_end|>\n", special=False)
    answer = tokenizer().encode("<|im_start|>assistant\n", special=False)
    assert prompt_of(model, CHAT).rows == [asked + answer]
    assert prompt_of(model, CHAT, add_generation_prompt=False).rows == [asked]
    assert prompt_of(model, [CHAT, CHAT * 2]).rows == [asked + answer, asked * 2 + answer]
    with pytest.raises(InputError, match="there is no chat template 'odd'"):
        prompt_of(model, CHAT, chat_options={"template": "odd"})


def test_nothing_is_the_id_that_texts_begin_with(model: Model) -> None:
    assert prompt_of(model).rows == [[1]]
    assert prompt_of(model, settings=settings_of(model, {"bos_token_id": 9})).rows == [[9]]
    with pytest.raises(InputError, match=r"no prompt was given, .* give a prompt, or bos_token_id"):
        prompt_of(model, settings=settings_of(model, {"bos_token_id": None}))


def test_embeddings_in_every_form_are_the_same_rows(model: Model) -> None:
    rows = [model.embed(torch.tensor(row)) for row in ROWS]
    forms: list[tuple[Any, Tensor | None]] = [(rows, None)]
    for left in (True, False):
        ids, mask = padded(ROWS, left)
        forms.append((model.embed(ids).masked_fill((mask == 0)[..., None], float("nan")), mask))
    for embeds, mask in forms:
        found = prompt_of(model, None, mask, inputs_embeds=embeds)
        assert (found.ids, found.counts, found.rows) == (None, [4, 1, 2], [[], [], []])
        assert found.embeds is not None
        for row, count, expected in zip(found.embeds, found.counts, rows, strict=True):
            assert torch.equal(row[:count], expected)
            assert not row[count:].any()
    assert prompt_of(model, inputs_embeds=rows[0]).counts == [4]
    assert prompt_of(model, ROWS, inputs_embeds=rows).rows == ROWS
    assert prompt_of(model, ids, mask, inputs_embeds=model.embed(ids)).rows == ROWS


def feed(model: Model, prompt: Prompt) -> tuple[Tensor, list[list[int]]]:
    cache = model.new_cache(len(prompt.counts))
    logits = model(prompt.ids, embeds=prompt.embeds, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    return logits, cache.tokens


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[f for f, _ in FIRST])
def test_embedded_prompts_of_every_family_give_the_logits_of_their_ids(family: str, name: str) -> None:
    model = pair(family, name)[1]
    expected, held = feed(model, prompt_of(model, ROWS))
    assert held == ROWS
    embedded = prompt_of(model, ROWS, inputs_embeds=[model.embed(torch.tensor([row]))[0] for row in ROWS])
    found, held = feed(model, embedded)
    assert relative(found, expected) < TOLERANCE
    assert held == [[-1] * len(row) for row in ROWS]


def test_generation_from_embeddings_goes_on_as_from_ids(model: Model) -> None:
    expected = model.generate(ROWS, 6, eos_token_id=()).tokens
    prompt = prompt_of(model, inputs_embeds=[model.embed(torch.tensor(row)) for row in ROWS])
    cache = model.new_cache(3)
    logits = model(embeds=prompt.embeds, cache=cache, counts=prompt.counts, logits="last")
    assert logits is not None
    first = logits.argmax(-1).tolist()
    rest = model.generate([[token] for token in first], 5, cache=cache, eos_token_id=()).tokens
    assert [[token, *after] for token, after in zip(first, rest, strict=True)] == expected


# -- models that read a source -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5() -> Model:
    return test_t5.pair(test_t5.FIRST)[1]


def test_prompts_are_the_source_and_the_decoder_begins_with_its_start_id(t5: Model) -> None:
    found = prompt_of(t5, ROWS)
    assert found.source is not None
    assert found.source.rows == ROWS
    assert found.rows == [[0]] * 3
    assert prompt_of(t5, ROWS, decoder_input_ids=[[4, 5], [0, 6], [0]]).rows == [[0, 4, 5], [0, 6], [0]]
    assert prompt_of(t5, *padded(ROWS, True), decoder_input_ids=torch.tensor([[4], [5], [6]])).rows[2] == [0, 6]
    several = settings_of(t5, {"decoder_start_token_id": [3, 4, 5]})
    assert prompt_of(t5, ROWS, settings=several).rows == [[3], [4], [5]]
    alone = prompt_of(t5, decoder_input_ids=[[4, 5]])
    assert (alone.source, alone.rows) == (None, [[0, 4, 5]])


def test_an_embedded_source_is_encoded_as_its_ids_are(t5: Model) -> None:
    rows = [t5.encoder.embed(torch.tensor(row)) for row in ROWS]  # type: ignore[operator, union-attr]
    found = prompt_of(t5, inputs_embeds=rows).source
    assert found is not None
    ids = prompt_of(t5, ROWS).source
    assert ids is not None
    encoded, expected = t5.encode(found.ids, found.counts, found.embeds), t5.encode(ids.ids, ids.counts)
    assert encoded.lengths.tolist() == expected.lengths.tolist() == [4, 1, 2]
    for row, other, count in zip(encoded.states, expected.states, found.counts, strict=True):
        assert relative(row[:count], other[:count]) < TOLERANCE


def test_a_padded_source_may_hold_anything_where_it_is_padded(t5: Model) -> None:
    ids, mask = padded(ROWS, left=False)
    embeds = t5.encoder.embed(ids)  # type: ignore[operator, union-attr]
    expected = t5.encode(embeds=embeds, counts=[4, 1, 2]).states
    found = t5.encode(embeds=embeds.masked_fill((mask == 0)[..., None], float("nan")), counts=[4, 1, 2]).states
    assert torch.equal(found[mask == 1], expected[mask == 1])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prompts": []}, "prompts must be text, a list of texts"),
        ({"prompts": {"input_ids": 3}}, "prompts must be text, .* not {'input_ids': 3}"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[], []]}, "prompt 0 is empty"),
        ({"prompts": ""}, "prompt 0 is empty"),
        ({"prompts": ["a", [1]]}, "prompts are text and ids in one list"),
        ({"prompts": [3, [1]]}, "prompts are an id and ids in one list"),
        ({"prompts": [1.5]}, "not a list that holds a float"),
        ({"prompts": [["a"]]}, "not a list that holds texts"),
        ({"prompts": [[1, 2.5]]}, r"prompt 0 must be a list of ids, whole numbers, not \[1, 2.5\]"),
        ({"prompts": [[1, "a"]]}, "prompt 0 must be a list of ids"),
        ({"prompts": torch.zeros(2, 3)}, "prompt ids must be whole numbers, not torch.float32: .* as inputs_embeds"),
        ({"prompts": torch.zeros(2, 3, 4).long()}, r"prompt ids must be \[B, T\] or \[T\], not \[2, 3, 4\]"),
        ({"prompts": [{"content": "a"}]}, "message 0 of a chat must be like"),
        ({"prompts": [[1]], "attention_mask": torch.ones(1, 1)}, "an attention_mask belongs to a tensor of ids"),
        ({"attention_mask": torch.ones(1, 1)}, "an attention_mask was given without a prompt"),
        (
            {"prompts": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)},
            r"attention_mask is \[1, 2\], the ids are \[1, 3\]",
        ),
        ({"prompts": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 0, 1]])}, "row 0 has a gap"),
        ({"inputs_embeds": torch.ones(1, 3, 5)}, "inputs_embeds are 5 wide, and the model's embeddings are 32 wide"),
        ({"inputs_embeds": torch.ones(3)}, r"inputs_embeds must be \[B, T, width\] .* not \[3\]"),
        ({"inputs_embeds": [torch.ones(3)]}, "or a list of tensors"),
        ({"inputs_embeds": [torch.ones(3, 32), torch.ones(0, 32)]}, "prompt 1 is empty"),
        ({"inputs_embeds": [torch.ones(3, 32), torch.ones(1, 31)]}, r"of one width, not of \[31, 32\]"),
        (
            {"inputs_embeds": torch.ones(1, 3, 32), "prompts": [[1, 2]]},
            r"the prompts name \[2\] ids and inputs_embeds hold \[3\] tokens",
        ),
        ({"prompts": [[1]], "decoder_input_ids": [[1]]}, "decoder_input_ids are for encoder–decoder models"),
    ],
)
def test_bad_prompts_are_refused(model: Model, given: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        prompt_of(model, **given)


def test_bad_sources_are_refused(t5: Model) -> None:
    with pytest.raises(InputError, match="this model reads a source: give a prompt"):
        prompt_of(t5)
    with pytest.raises(InputError, match="decoder_input_ids have 1 rows, the source has 3"):
        prompt_of(t5, ROWS, decoder_input_ids=[[1]])
    with pytest.raises(InputError, match="decoder_start_token_id has 2 ids for 3 rows"):
        prompt_of(t5, ROWS, settings=settings_of(t5, {"decoder_start_token_id": [3, 4]}))


def test_texts_and_chats_need_a_tokenizer() -> None:
    model = pair("llama", "grouped")[1]
    for prompts in ("hello", CHAT):
        with pytest.raises(InputError, match="this checkpoint has no tokenizer"):
            prompt_of(model, prompts)


def test_empty_rows_are_taken_where_a_cache_may_hold_all_there_is(model: Model) -> None:
    found = prompt_of(model, [[], [3, 4]], held=[3, 4])
    assert (found.rows, found.counts) == ([[], [3, 4]], [0, 2])
    assert prompt_of(model, held=[1, 1, 1]).counts == [0, 0, 0]


def test_a_decoder_that_goes_on_gets_no_start_id_unless_its_source_is_new(t5: Model) -> None:
    assert prompt_of(t5, held=[3, 4]).rows == [[], []]
    assert prompt_of(t5, decoder_input_ids=[[4], []], held=[3, 4]).rows == [[4], []]
    assert prompt_of(t5, [[5, 6]], decoder_input_ids=[[4]], held=[5]).rows == [[*t5.start_ids, 4]]
