"""tekken.json and tiktoken.model are cut by ranks, as the packages do that read them."""

from __future__ import annotations

import base64
import importlib
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers

from lamina import CheckpointError
from lamina.checkpoint.gguf.splits import TEKKEN
from lamina.checkpoint.tokenizer import folder_tokenizer
from lamina.checkpoint.vocab.ranks import FIRST_TEKKEN
from tests.checkpoint.vocab_files import HARD, TEXTS, write

WORDS = [
    "the",
    "hell",
    "hello",
    "he",
    "ll",
    " the",
    " w",
    "or",
    " wor",
    "ld",
    " world",
    "\u00e9",
    "\u65e5",
    "in",
    "ing",
    "202",
]
TOKENS = [bytes([i]) for i in random.Random(0).sample(range(256), 256)]
TOKENS += [text.encode() for text in dict.fromkeys(word[:n] for word in WORDS for n in range(2, len(word) + 1))]


def merged_by_rank(word: bytes) -> list[int]:
    """The two neighbours whose joined bytes have the lowest rank, the leftmost of equals, become one."""
    if word in TOKENS:
        return [TOKENS.index(word)]
    parts = [bytes([byte]) for byte in word]
    while pairs := [(TOKENS.index(a + b), i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in TOKENS]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [TOKENS.index(part) for part in parts]


def put_tekken(folder: Path, special: list[str] | None, count: int = 30, left_out: int = 0) -> None:
    config = {
        "pattern": TEKKEN,
        "default_num_special_tokens": count,
        "default_vocab_size": count + len(TOKENS) - left_out,
    }
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(TOKENS)]
    listed = {} if special is None else {"special_tokens": [{"rank": i, "token_str": t} for i, t in enumerate(special)]}
    write(folder, tekken={"config": config, "vocab": vocab} | listed, config={"model_type": "mistral"})


@pytest.mark.parametrize("left_out", [0, 4])
def test_tekken_equals_the_conversion_of_transformers_with_a_bos_token(tmp_path: Path, left_out: int) -> None:
    put_tekken(tmp_path, FIRST_TEKKEN, left_out=left_out)
    module = importlib.import_module("transformers.integrations.mistral.tokenizer")
    theirs = module.MistralConverter(str(tmp_path / "tekken.json")).converted()
    ours = folder_tokenizer(tmp_path)
    assert ours is not None and (ours.bos_id, ours.eos_ids, ours.vocab_size) == (1, (2,), theirs.get_vocab_size())
    for text in [*TEXTS, *HARD, "[INST]the[/INST] <SPECIAL_29>"]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == [1, *ids] and ours.encode(text, special=False) == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, skip_special_tokens=False)


def test_the_first_tekken_files_do_not_list_special_tokens(tmp_path: Path) -> None:
    put_tekken(tmp_path, None)
    ours = folder_tokenizer(tmp_path)
    assert ours is not None
    assert ours.encode("[INST]he") == [1, 3, *(30 + i for i in merged_by_rank(b"he"))]


def put_tiktoken(folder: Path, model_type: str) -> None:
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(TOKENS)]
    (folder / "tiktoken.model").write_text("".join(lines))
    token = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    listed = {len(TOKENS) + i: token | {"content": text} for i, text in ((0, "[BOS]"), (3, "[EOS]"))}
    write(folder, config={"model_type": model_type})
    write(folder, tokenizer_config={"added_tokens_decoder": listed, "bos_token": "[BOS]", "eos_token": "[EOS]"})


def test_tiktoken_merges_the_joined_token_of_lowest_rank_first(tmp_path: Path) -> None:
    put_tiktoken(tmp_path, "kimi_linear")
    ours = folder_tokenizer(tmp_path)
    assert ours is not None
    for word in ("hello", "hellthe", "nothing", " world", "202", "\u65e5\u672c", "heorld"):
        assert ours.encode(word) == merged_by_rank(word.encode())
    end = len(TOKENS)
    assert ours.encode("[BOS]he[EOS]") == [end, *merged_by_rank(b"he"), end + 3]
    assert ours.encode(f"<|reserved_token_{end + 1}|>") == [end + 1] and ours.eos_ids == (end + 3,)


def test_kimi_cuts_chinese_words_from_others(tmp_path: Path) -> None:
    put_tiktoken(tmp_path, "kimi_linear")
    ours = folder_tokenizer(tmp_path)
    assert ours is not None and ours.backend.pre_tokenizer is not None
    cut = ours.backend.pre_tokenizer.pre_tokenize_str("Abc\u4e2d\u6587def 1234")
    assert [end - start for _, (start, end) in cut] == [3, 2, 3, 1, 3, 1]


def test_tiktoken_equals_the_conversion_of_transformers_for_other_families(tmp_path: Path, monkeypatch: Any) -> None:
    put_tiktoken(tmp_path, "llama")
    module = importlib.import_module("transformers.convert_slow_tokenizer")
    ranks = {token: i for i, token in enumerate(TOKENS)}
    monkeypatch.setattr(module.TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda path: ranks))
    theirs = transformers.TokenizersBackend.from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    assert ours is not None
    for text in [*TEXTS, *HARD, "[BOS]the[EOS] <|reserved_token_0|>"]:
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.parametrize("content", ["{}", json.dumps({"config": {}, "vocab": [{"token_bytes": "\u00e9"}]})])
def test_a_broken_tekken_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tekken\.json is not a vocabulary of Mistral's"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [("YQ== 0\nYg==\n", "is not a vocabulary"), ("YQ== 1\n", "ranks that are not 0, 1, 2")]
)
def test_a_broken_tiktoken_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tiktoken.model").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        folder_tokenizer(tmp_path)
