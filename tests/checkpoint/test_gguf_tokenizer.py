from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers import pre_tokenizers as pre

from lamina import CheckpointError
from lamina.checkpoint import open_source, packaged_smollm2
from lamina.checkpoint.gguf.tokenizer import SPLITS, gguf_tokenizer
from lamina.checkpoint.tokenizer import UnknownTokenizer

from .test_tokenizer import BACKEND, SPECIAL, TEXTS
from .vocab_files import HARD


def metadata(**changes: Any) -> dict[str, Any]:
    """What a GGUF file would hold for the small byte-level tokenizer."""
    state = json.loads(BACKEND.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": [" ".join(merge) for merge in state["merges"]],
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize("text", TEXTS)
def test_it_equals_the_tokenizer_it_was_made_from(text):
    tokenizer = gguf_tokenizer(metadata(), (2,))
    ids = tokenizer.encode(text)
    assert ids == BACKEND.encode(text).ids
    assert tokenizer.decode(ids) == BACKEND.decode(ids)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), BACKEND.get_vocab_size())
    assert tokenizer.special_tokens["eos_token"] == tokenizer.special_tokens["pad_token"] == "<|im_end|>"


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20))
def test_it_equals_the_tokenizer_it_was_made_from_on_any_text(text):
    assert gguf_tokenizer(metadata(), ()).encode(text) == BACKEND.encode(text).ids


def test_it_survives_a_file(tmp_path):
    import gguf

    from .test_gguf import llama_arrays, write

    values = metadata()

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(values["tokenizer.ggml.tokens"])
        writer.add_token_merges(values["tokenizer.ggml.merges"])
        writer.add_token_types([gguf.TokenType(t) for t in values["tokenizer.ggml.token_type"]])
        writer.add_eot_token_id(0)
        writer.add_chat_template([{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])

    tokenizer = open_source(write(tmp_path / "m.gguf", llama_arrays(), extra=add)).tokenizer()
    assert [tokenizer.encode(text) for text in TEXTS] == [BACKEND.encode(text).ids for text in TEXTS]
    assert tokenizer.eos_ids == (2, 0)
    assert (tokenizer.chat([]), tokenizer.chat([], template="tool_use")) == ("A", "B")


def test_bos_and_eos_are_added_as_the_file_says():
    hello = BACKEND.encode("hi").ids
    assert gguf_tokenizer(metadata(add_bos_token=True), ()).encode("hi") == [1, *hello]
    both = gguf_tokenizer(metadata(add_bos_token=True, add_eos_token=True), ())
    assert both.encode("hi") == [1, *hello, 2]
    assert both.encode("hi", special=False) == hello
    unsaid = metadata(add_bos_token=None)
    assert gguf_tokenizer(unsaid, ()).encode("hi") == hello
    assert gguf_tokenizer(unsaid | {"tokenizer.ggml.pre": "llama-bpe"}, ()).encode("hi")[0] == 1


def test_user_defined_tokens_stay_whole_and_are_not_special():
    values = metadata()
    values["tokenizer.ggml.tokens"].append("<think>")
    values["tokenizer.ggml.token_type"].append(4)
    tokenizer = gguf_tokenizer(values, ())
    ids = tokenizer.encode("a<think>b<|im_end|>")
    assert len(values["tokenizer.ggml.tokens"]) - 1 in ids
    assert tokenizer.decode(ids) == "a<think>b"


SPLIT_TEXTS = {
    "gpt-2": ("I'm 1234 ok!!\n\n x", ["I", "'m", " 1234", " ok", "!!", "\n\n", " x"]),
    "smollm": ("I'm 12 ok", ["I", "'m", " ", "1", "2", " ok"]),
    "llama-bpe": ("I'M 12345 ok!\n\n x", ["I", "'M", " ", "123", "45", " ok", "!\n\n", " x"]),
    "qwen2": ("I'M 12 ok", ["I", "'M", " ", "1", "2", " ok"]),
    "gpt-4o": ("HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    "tekken": ("HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    "deepseek-v3": ("a日本1234b!", ["a", "日本", "123", "4", "b", "!"]),
    "falcon": ("I'm `a` 12345", ["I", "'", "m", " ", "`", "a", "`", " ", "123", "45"]),
    "command-r": ("I'm 12", ["I", "'m", " ", "1", "2"]),
    "deepseek-llm": ("Hi you!\n中12", ["Hi", " you", "!", "\n", "中", "12"]),
    "deepseek-coder": ("Hi you! 12", ["Hi", " you", "!", " ", "1", "2"]),
    "glm4": ("I'M 12345", ["I", "'M", " ", "123", "45"]),
    "qwen35": ("café 12", ["café", " ", "1", "2"]),
    "bloom": ("Hi you, 12!", ["Hi", " you", ",", " 12", "!"]),
    "kimi-k2": ("HiYou's 中文ab1234", ["Hi", "You's", " ", "中文", "ab", "123", "4"]),
    "default": ("a+b 12345", ["a", "+", "b", " ", "123", "45"]),
}


@pytest.mark.parametrize("name", SPLIT_TEXTS)
def test_each_split_cuts_as_its_vocabulary_was_trained(name):
    text, expected = SPLIT_TEXTS[name]
    steps = [pre.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[name].patterns]
    assert [piece for piece, _ in pre.Sequence(steps).pre_tokenize_str(text)] == expected


def test_words_that_are_tokens_are_taken_whole_where_the_split_says_so():
    values = metadata(tokens=["a", "b", "c", "ab", "abc"], merges=["b c"], token_type=[1] * 5, bos_token_id=None)
    values |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False}
    values["tokenizer.ggml.tokens"].append("bc")
    assert gguf_tokenizer(values, ()).encode("abc") == [0, 5]
    assert gguf_tokenizer(values | {"tokenizer.ggml.pre": "llama-bpe"}, ()).encode("abc") == [4]


def test_a_file_without_tokenizer_gives_none_and_unknown_kinds_are_named():
    assert gguf_tokenizer({}, ()) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "no_vocab"}, ()) is None
    with pytest.raises(CheckpointError, match=r"of kind 'rwkv'; supported are: gemma4, gpt2, llama"):
        gguf_tokenizer({"tokenizer.ggml.model": "rwkv"}, ())
    with pytest.raises(CheckpointError, match=r"splits text by 'odd' .* known are: .*smollm"):
        gguf_tokenizer(metadata(pre="odd"), ())
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.ggml\.tokens"):
        gguf_tokenizer(metadata(tokens=[]), ())
    with pytest.raises(CheckpointError, match="tokens and merges do not fit"):
        gguf_tokenizer(metadata(merges=["no such"]), ())


PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "cc", "▁▁", "aab", "ba"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def merged_by_score(text: str) -> list[int]:
    """The rule in words: as long as two neighbours join to a token, join the best-scored, leftmost pair."""
    tokens, scores = SENTENCE_PIECE["tokenizer.ggml.tokens"], SENTENCE_PIECE["tokenizer.ggml.scores"]
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(scores[tokens.index(a + b)], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [tokens.index(part)] if part in PIECES else [3 + byte for byte in part.encode()]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="abc é😀", min_size=1, max_size=12))
def test_sentence_piece_merges_the_best_scored_pair_first(text):
    tokenizer = gguf_tokenizer(SENTENCE_PIECE, (2,))
    ids = tokenizer.encode(text)
    assert ids == [1, *merged_by_score(text)]
    assert tokenizer.decode(ids) == text


def test_stored_merges_replace_scores():
    tokens = [*SENTENCE_PIECE["tokenizer.ggml.tokens"]]
    values = SENTENCE_PIECE | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": ["b c", "a bc", "▁ a"],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = gguf_tokenizer(values, (2,))
    ids = tokenizer.encode("abc aé")
    assert [tokens[i] for i in ids] == ["<s>", "abc", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "abc aé"


def test_sentence_piece_needs_a_score_for_each_token():
    with pytest.raises(CheckpointError, match=r"has 272 tokens but 0 scores"):
        gguf_tokenizer(SENTENCE_PIECE | {"tokenizer.ggml.scores": []}, ())


def test_smollm2_is_read_right():
    source = open_source(packaged_smollm2())
    config = source.config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (
        30,
        9,
        3,
    )
    assert (config["hidden_size"], config["vocab_size"], config["tie_word_embeddings"]) == (576, 49152, True)
    assert len(source.names) == 272
    assert source.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    assert source.read("model.layers.29.mlp.down_proj.weight").isfinite().all()
    tokenizer = source.tokenizer()
    assert tokenizer.eos_ids == (2,)
    known = {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
        "  multiple   spaces": [216, 2701, 256, 5600],
    }
    assert {text: tokenizer.encode(text) for text in known} == known
    chat = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(chat, special=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert tokenizer.decode(ids, skip_special=False) == chat


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merges": None}, r"has no tokenizer\.ggml\.merges, by which text is cut"),
        ({"merges": ["ab"]}, r"tokenizer\.ggml\.merges has 'ab', which is not two tokens with a space between them"),
        ({"merges": ["ab "]}, r"tokens and merges do not fit"),
    ],
)
def test_merges_that_cannot_be_read_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(metadata(**changes), ())


def test_an_id_past_the_last_token_is_left_out_with_a_notice(caplog):
    tokenizer = gguf_tokenizer(metadata(bos_token_id=10**6, add_bos_token=True), ())
    assert tokenizer.bos_id is None and tokenizer.encode("hi") == BACKEND.encode("hi").ids
    assert "bos_token_id is 1000000, and the GGUF tokenizer has 320 tokens" in caplog.text


def test_a_chat_template_must_be_a_text():
    with pytest.raises(CheckpointError, match=r"the chat template 'rag' of the GGUF file .* is no text"):
        gguf_tokenizer(metadata() | {"tokenizer.chat_template.rag": 5}, ())


def test_a_tokenizer_file_beside_a_gguf_file_counts_if_that_has_none_that_is_read(tmp_path):
    from .test_gguf import llama_arrays, write

    def add(kind: str) -> Any:
        return lambda writer: writer.add_tokenizer_model(kind)

    path = write(tmp_path / "m.gguf", llama_arrays(), extra=add("rwkv"))
    with pytest.raises(UnknownTokenizer, match=r"of kind 'rwkv'; .*; a tokenizer\.json beside the file would be read"):
        open_source(path).tokenizer()
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    for extra in (add("rwkv"), None):
        path = write(tmp_path / "m.gguf", llama_arrays(), extra=extra)
        assert open_source(path).tokenizer().encode(TEXTS[0]) == BACKEND.encode(TEXTS[0]).ids


def test_smollm2_gives_the_ids_of_transformers_with_the_split_that_the_file_names():
    """transformers leaves tokenizer.ggml.pre out, so digits are not words of their own there."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = packaged_smollm2()
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    theirs.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    ours = open_source(path).tokenizer()
    for text in [*TEXTS, *HARD, "a  123", "\u2460\u00b2 12.5", "<|im_start|>x<|im_end|> <repo_name>", "\n\n  \n a"]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)
