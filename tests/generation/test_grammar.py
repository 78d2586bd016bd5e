"""Grammars: what may follow, in ragged rows that are extended, rewound, exchanged and ended in any order."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import InputError
from lamina.sampling import grammar
from lamina.sampling.chain import Facts, apply, chain_of
from lamina.sampling.grammar import Grammar, grammar_of, vocabulary_of
from lamina.sampling.history import History
from lamina.sampling.noise import draw
from tests.generation.histories import asked, history_of

MERGES = [("t", "r"), ("tr", "u"), ("tru", "e"), ("{", '"'), ('"', ":"), ("1", "2"), ("12", "3"), ("a", "b")]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}, "of": {"enum": ["ab", "b"]}},
    "required": ["ok", "n", "of"],
    "additionalProperties": False,
}


@functools.cache
def tokenizer() -> Tokenizer:
    """Every byte, a few longer tokens, and an end token."""
    vocab = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    backend = Backend(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<other end>"])
    return Tokenizer(backend, eos_ids=[len(vocab)])


END = 256 + len(MERGES)
VOCAB = END + 5  # more scores than tokens


def made(given: Any, beams: int = 1) -> Grammar:
    return grammar_of(given, tokenizer(), [END], VOCAB, beams)


def allowed(grammar: Grammar, text: str | list[int], number: int = 0) -> set[str]:
    """The tokens that may follow."""
    ids = tokenizer().encode(text) if isinstance(text, str) else text
    (mask,) = grammar.allowed([ids], [number], VOCAB)
    return {tokenizer().decode([id], skip_special=False) for id in mask.nonzero()[:, 0].tolist()}


def test_a_regular_expression_says_what_may_follow() -> None:
    one = made({"regex": "(true|12)+"})
    assert allowed(one, "") == {"t", "tr", "tru", "true", "1", "12"}
    assert allowed(one, "tr") == {"u"}
    assert allowed(one, "true12") == {"t", "tr", "tru", "true", "1", "12", "<end>"}


def test_where_nothing_can_follow_only_the_end_is_allowed() -> None:
    one = made({"regex": "12"})
    assert allowed(one, "12") == {"<end>"}
    assert allowed(one, [261, END]) == {"<end>"}
    assert allowed(one, [261, END, 3, 3]) == {"<end>"}, "what comes after the end does not matter"
    assert allowed(one, "1") == {"2"}, "an ended row can be taken back"


def test_a_choice_of_texts_and_a_lark_grammar() -> None:
    texts = ["ab", "abc", 'é "x"\n\\']
    one = made({"choice": texts})
    assert allowed(one, "ab") == {"c", "<end>"}
    for text in texts:
        assert "<end>" in allowed(one, text)
    lark = made({"lark": 'start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"'})
    assert "<end>" in allowed(lark, "1,(2,3),12") and ")" not in allowed(lark, "1,(2,3),12")
    assert {")", ","} <= allowed(lark, "(1") and "<end>" not in allowed(lark, "(1")


def fits(given: Any, text: str) -> bool:
    """Whether a grammar is satisfied by a text."""
    try:
        return "<end>" in allowed(made(given), text)
    except InputError:
        return False


@pytest.mark.parametrize(
    ("regex", "yes", "no"),
    [
        (r"\d{4}", ["2024"], ["٢٠٢٤", "20２4"]),
        (r"\w+", ["a_9Z"], ["é", "日本"]),
        (r"a\sb", ["a b", "a\tb", "a\vb"], ["a\u00a0b", "a\u2003b"]),
        (r"\D\W\S", ["é.x", "٣ée", "a٣\u00a0"], ["3.x", "aax", "a. "]),
        (r"[\d.]+", ["3.1"], ["٣", "3,1"]),
        (r"[^\d\s]", ["a", "٣"], ["3", " "]),
        (r"[\w--\d]+", ["ab"], ["a1", "é"]),
        (r"[\W\d]", ["é", "3", " "], ["a"]),
        (r"(?x) \d \s # \w", ["3 "], ["٣ ", "3"]),
        (r"\\d\.\x41\p{Nd}", [r"\d.A3", r"\d.A٣"], ["3.A3"]),
    ],
)
def test_classes_of_regular_expressions_are_ascii_unless_unicode_is_asked_for(
    regex: str, yes: list[str], no: list[str]
) -> None:
    for text in yes:
        assert fits({"regex": regex}, text), text
        assert fits({"lark": f"start: A\nA: /{regex}/"}, text) or "#" in regex, text
    for text in no:
        assert not fits({"regex": regex}, text), text
        assert not fits({"lark": f"start: A\nA: /{regex}/"}, text), text


def test_unicode_classes_are_there_for_the_asking() -> None:
    assert fits({"regex": r"\d{2}", "unicode": True}, "٢٤") and fits({"regex": r"\d{2}", "unicode": True}, "24")
    assert fits({"lark": r"start: /\w/", "unicode": True}, "é") and not fits({"lark": r"start: /\w/"}, "é")
    assert not fits({"regex": r"\d", "unicode": False}, "٣")
    assert not fits({"json": {"type": "string", "pattern": r"^\d$"}}, '"٣"')


def test_texts_and_comments_of_a_lark_grammar_stay_as_they_are() -> None:
    lark = 'start: "\\\\d" A "/\\\\d/"  // "\\d\nA: /\\/\\d/  # /\\d'
    assert fits({"lark": lark}, r"\d/3/\d/") and not fits({"lark": lark}, r"\d/٣/\d/")


@pytest.mark.parametrize("text", [json.dumps(SCHEMA), SCHEMA], ids=["text", "mapping"])
def test_a_json_schema_given_as_text_or_mapping(text: Any) -> None:
    one = made({"json": text})
    assert "<end>" in allowed(one, '{"ok":true,"n":12,"of":"b"}')
    assert "x" not in allowed(one, '{"ok":true,"n":12,"of":"')
    assert {"a", "ab", "b"} == allowed(one, '{"ok":true,"n":12,"of":"')


def test_every_row_drawn_under_a_schema_is_a_document_of_it() -> None:
    """Random scores, eight ragged rows, ended rows dropped from the batch: what stays is only the grammar."""
    settings = asked(grammar={"json": SCHEMA}, eos_token_id=END, do_sample=True, temperature=0.7)
    chain = chain_of(settings, Facts(VOCAB, tokenizer=tokenizer()))
    generator = torch.Generator().manual_seed(2)
    prompts = [[5] * n for n in (1, 4, 2, 7, 3, 1, 9, 2)]
    new: list[list[int]] = [[] for _ in prompts]
    live = list(range(8))
    for _ in range(120):
        history = history_of([prompts[r] for r in live], [new[r] for r in live])
        history.rows = live
        scores = torch.randn(len(live), VOCAB, generator=generator)
        scores[:, tokenizer().encode("}")] += 2  # documents are to end some day
        ids = draw(apply(scores, history, chain), 1, torch.tensor(live), history.lengths)
        for row, id in zip(live, ids.tolist(), strict=True):
            new[row].append(id)
        live = [row for row in live if new[row][-1] != END]
        if not live:
            break
    assert not live
    for row in new:
        found = json.loads(tokenizer().decode(row))
        assert set(found) == {"ok", "n", "of"} and found["of"] in ("ab", "b") and isinstance(found["n"], int)


def test_the_answer_depends_on_the_tokens_alone_whatever_was_asked_before() -> None:
    """Extending, rewinding, taking another row's tokens, ending: always as a matcher that begins anew."""
    draws = random.Random(3)
    texts = [tokenizer().encode(text) for text in ("ab12ab", "12ab(12)", "(ab(12)ab)", "((12))", "ab", "")]
    given = {"lark": 'start: (item)*\nitem: "ab" | "12" | "(" start ")"'}
    kept = made(given)
    for _ in range(60):
        rows = [text[: draws.randint(0, len(text))] for text in draws.choices(texts, k=3)]
        rows = [[*row, END] if draws.random() < 0.1 else row for row in rows]
        numbers = draws.sample(range(4), 3)
        fresh = torch.cat([made(given).allowed([row], [0], VOCAB) for row in rows])
        assert torch.equal(kept.allowed(rows, numbers, VOCAB), fresh)


def test_only_new_tokens_count_and_scores_are_cut_to_what_is_allowed() -> None:
    one = made({"regex": "12|ab"})
    history = history_of([[3, 4], [5]], [tokenizer().encode("1"), []], garbage=7)
    scores = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    found = one(scores, history)
    assert found[0].isfinite().nonzero()[:, 0].tolist() == tokenizer().encode("2")
    assert torch.equal(found[found.isfinite()], scores[found.isfinite()])
    assert found[1].isfinite().sum() == 4  # 1, 12, a, ab


def test_the_grammar_has_the_last_word_over_other_bans() -> None:
    """min_new_tokens bans the end where the grammar allows nothing else."""
    settings = asked(grammar={"regex": "12"}, min_new_tokens=9, eos_token_id=END)
    chain = chain_of(settings, Facts(VOCAB, tokenizer=tokenizer()))
    found = apply(torch.zeros(1, VOCAB), history_of([[1]], [tokenizer().encode("12")]), chain)
    assert found[0].isfinite().nonzero().tolist() == [[END]]


def test_a_token_outside_the_grammar_is_an_error_and_a_dead_end_for_a_beam() -> None:
    wrong = tokenizer().encode("1x")
    with pytest.raises(InputError, match="row 0: new token number 1 is the id 87, which the grammar does not allow"):
        made({"regex": "12"}).allowed([wrong], [0], VOCAB)
    beams = made({"regex": "12"}, beams=2)
    assert allowed(beams, wrong) == {"<end>"}
    assert allowed(beams, "1") == {"2"}


def test_a_row_with_several_end_tokens_may_end_with_each() -> None:
    one = grammar_of({"regex": "12"}, tokenizer(), [END, END + 1], VOCAB)
    assert allowed(one, "12") == {"<end>", "<other end>"}


def test_a_model_with_fewer_scores_than_tokens_is_cut_to_its_own() -> None:
    one = grammar_of({"regex": "12|true"}, tokenizer(), [3], 200)
    history = History(torch.tensor([1]), torch.tensor([1]), torch.tensor([[0]]), None)
    found = one(torch.zeros(1, 200), history)
    assert [tokenizer().decode([id]) for id in found[0].isfinite().nonzero()[:, 0].tolist()] == ["1", "t"]


def test_a_tokenizer_is_taken_over_once() -> None:
    assert vocabulary_of(tokenizer(), (END,), VOCAB) is vocabulary_of(tokenizer(), (END,), VOCAB)
    assert vocabulary_of(tokenizer(), (END,), VOCAB) is not vocabulary_of(tokenizer(), (END, 1), VOCAB)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[0-9]+", r"grammar must be a mapping with one of json, regex, lark, choice, not '\[0-9\]\+'"),
        ({"xml": "a"}, "grammar must be a mapping with one of json, regex, lark, choice"),
        ({"regex": "a", "json": {}}, "grammar must be a mapping with one of"),
        ({"unicode": True}, "grammar must be a mapping with one of"),
        ({"regex": "a", "unicode": 1}, "grammar has unicode=1: it must be True or False"),
        (
            {"json": {}, "unicode": True},
            "grammar has unicode=True beside json: it is for regex and lark only",
        ),
        ({"regex": 5}, "the regex grammar 5 cannot be"),
        ({"lark": None}, "the lark grammar None cannot be"),
        ({"regex": "(true"}, r"the regex grammar '\(true' cannot be used: .*unclosed group"),
        ({"json": {"type": "strin"}}, "the json grammar .* cannot be used: Invalid type: strin"),
        ({"json": "{"}, "the json grammar '{' cannot be"),
        ({"lark": "start: b"}, "the lark grammar 'start: b' cannot be used: .*unknown name"),
        ({"choice": "ab"}, "choice must be a list of texts, not 'ab'"),
        ({"choice": []}, r"choice must be a list of texts, not \[\]"),
    ],
)
def test_what_is_no_grammar_is_refused_in_words(given: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        made(given)
    assert re.search(message, str(caught.value), re.S), str(caught.value)


def test_what_a_grammar_needs_is_asked_for() -> None:
    with pytest.raises(InputError, match="this checkpoint has no tokenizer"):
        grammar_of({"regex": "a"}, None, [END], VOCAB)
    with pytest.raises(InputError, match="a grammar needs eos_token_id"):
        grammar_of({"regex": "a"}, tokenizer(), [], VOCAB)
    with pytest.raises(InputError, match="eos_token_id has the id 300; this model's ids are 0 to 268"):
        grammar_of({"regex": "a"}, tokenizer(), [300], VOCAB)


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(grammar, "import_module", missing)
    with pytest.raises(InputError, match=re.escape("pip install lamina[grammar]")):
        made({"regex": "a"})


def test_a_tokenizer_that_the_library_does_not_read_is_refused_in_words() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Fuse()
    with pytest.raises(InputError, match=r"needs a tokenizer that llguidance reads.*use prefix_allowed_tokens_fn"):
        grammar_of({"regex": "a"}, Tokenizer(backend), [1], 2)
