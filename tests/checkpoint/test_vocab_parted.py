"""Tokenizers that cut text in Python give the ids and the text that transformers' classes give for the same files."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from types import ModuleType

import pytest
import transformers

from lamina import CheckpointError
from lamina.checkpoint.tokenizer import UnknownTokenizer, folder_tokenizer
from lamina.checkpoint.vocab.moses import rules
from tests.checkpoint.spm import BPE, UNIGRAM, UNUSED, small_model
from tests.checkpoint.vocab_files import HARD, MAP, REPLACED, TEXTS, compare, lookup_vocab, put_model, write

NORMALIZED = [{}, {"charsmap": MAP, "replaced": REPLACED}]


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("options", NORMALIZED)
@pytest.mark.parametrize("kind", [UNIGRAM, BPE])
def test_marian(tmp_path, processor, kind, options):
    module = importlib.import_module("transformers.models.marian.tokenization_marian")
    source, target = small_model(kind, **options), small_model(UNIGRAM, **options)
    source.pieces.append(("▁hello", 5.0, UNUSED))
    vocab = lookup_vocab(source, "</s> <unk>") | {"<pad>": 500}
    write(tmp_path, vocab=vocab, config={"model_type": "marian"})
    files = [str(put_model(tmp_path, f"{n}.spm", m)) for n, m in (("source", source), ("target", target))]
    theirs = module.MarianTokenizer(*files, str(tmp_path / "vocab.json"))
    ours = folder_tokenizer(tmp_path)
    codes = [">>fr<< the world", ">>xx<<the", ">> the", "</s>>>fr<<the<<", ">>fr<<"]
    compare(ours, theirs, [text for text in [*TEXTS, *HARD, *codes] if "<user>" not in text])
    assert ours.eos_ids == (0,)


@pytest.mark.filterwarnings("ignore:Recommended")
def test_marian_with_separate_vocabularies_decodes_with_that_of_the_target(tmp_path, processor):
    module = importlib.import_module("transformers.models.marian.tokenization_marian")
    model = small_model()
    write(
        tmp_path, vocab=lookup_vocab(model, "</s> <unk> <pad>"), target_vocab=lookup_vocab(model, "<pad> <unk> </s> x")
    )
    files = [str(put_model(tmp_path, f"{name}.spm", model)) for name in ("source", "target")]
    write(tmp_path, tokenizer_config={"tokenizer_class": "MarianTokenizer", "separate_vocabs": True})
    names = [str(tmp_path / f"{name}.json") for name in ("vocab", "target_vocab")]
    theirs = module.MarianTokenizer(*files, *names, separate_vocabs=True)
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs, [text for text in [*TEXTS, *HARD] if "<user>" not in text], decode=False)
    ids = [theirs.target_encoder[text] for text in ("▁the", "▁world", "!") if text in theirs.target_encoder]
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("normalized", NORMALIZED)
@pytest.mark.parametrize("options", [{}, {"src_lang": "fr"}, {"language_codes": "wmt21", "src_lang": "de"}])
def test_m2m_100(tmp_path, processor, options, normalized):
    module = importlib.import_module("transformers.models.m2m_100.tokenization_m2m_100")
    model = small_model(BPE, **normalized)
    vocab = lookup_vocab(model, "<s> <pad> </s> <unk>")
    write(tmp_path, vocab=vocab, tokenizer_config=options | {"tokenizer_class": "M2M100Tokenizer"})
    spm = put_model(tmp_path, "sentencepiece.bpe.model", model)
    codes = [f"__{code}__" for code in module.FAIRSEQ_LANGUAGE_CODES[options.get("language_codes", "m2m100")]]
    theirs = module.M2M100Tokenizer(  # the codes as published folders list them
        str(tmp_path / "vocab.json"), str(spm), additional_special_tokens=codes, **options
    )
    ours = folder_tokenizer(tmp_path)
    texts = [text for text in [*TEXTS, *HARD, "__de__ the", "x__fr____en__"] if "<user>" not in text]
    compare(ours, theirs, texts)
    assert ours.languages["de"] == theirs.get_lang_id("de")
    ours.set_language("ja")
    theirs.src_lang = "ja"
    compare(ours, theirs, texts)


@pytest.mark.parametrize("normalized", NORMALIZED)
@pytest.mark.parametrize("options", [{}, {"src_lang": "python"}, {"language_codes": "multi"}])
def test_plbart(tmp_path, processor, options, normalized):
    module = importlib.import_module("transformers.models.plbart.tokenization_plbart")
    spm = put_model(tmp_path, "sentencepiece.bpe.model", small_model(BPE, **normalized))
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": "PLBartTokenizer"})
    theirs = module.PLBartTokenizer(str(spm), **options)
    # its decoding moves punctuation, whatever it is asked for
    compare(folder_tokenizer(tmp_path), theirs, [t for t in [*TEXTS, *HARD] if "<user>" not in t], decode=False)


@pytest.mark.parametrize("normalized", NORMALIZED)
@pytest.mark.parametrize("kind", [UNIGRAM, BPE])
def test_bert_generation(tmp_path, processor, kind, normalized):
    module = importlib.import_module("transformers.models.bert_generation.tokenization_bert_generation")
    spm = put_model(tmp_path, "spiece.model", small_model(kind, **normalized))
    write(tmp_path, config={"model_type": "bert-generation"})
    theirs = module.BertGenerationTokenizer(str(spm))
    texts = [text for text in [*TEXTS, *HARD, "a<::::> b"] if "<user>" not in text]
    compare(folder_tokenizer(tmp_path), theirs, texts)


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"single_word": True}, {}])
def test_added_tokens_take_the_spaces_that_their_flags_say(tmp_path, processor, flags):
    module = importlib.import_module("transformers.models.bert_generation.tokenization_bert_generation")
    model = small_model(collapse=False)
    spm, first = put_model(tmp_path, "spiece.model", model), len(model.pieces)
    token = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    listed = {first: token | flags | {"content": "<new>"}}
    options = {"tokenizer_class": "BertGenerationTokenizer", "added_tokens_decoder": listed}
    write(tmp_path, tokenizer_config=options)
    theirs = module.BertGenerationTokenizer(
        str(spm), added_tokens_decoder={first: transformers.AddedToken(**listed[first])}
    )
    texts = [
        "a <new> b",
        "a<new>b",
        "<new>",
        " <new>  <new>b",
        "a <new>b",
        "the<new> he",
        "<new><new> <new>",
        "a  <new>",
    ]
    compare(folder_tokenizer(tmp_path), theirs, texts, decode=False)


@pytest.mark.parametrize("json_file", [False, True])
def test_blenderbot_small(tmp_path, json_file):
    if json_file:  # its own files count
        (tmp_path / "tokenizer.json").write_text("{}")
    merges = [
        "t h",
        "th e</w>",
        "h e",
        "l l",
        "he ll",
        "hell o</w>",
        "w o",
        "i n",
        "in g</w>",
        "2 0",
        "_ _",
        "x y",
        "xy z</w>",
    ]
    vocab = (
        "__null__ __start__ __end__ __unk__ the th@@ hello wo@@ r@@ l@@ d t@@ h@@ e@@ o ing in@@ s@@ n@@ g . , ! ' a "
        "20@@ __@@ z"
    )
    write(tmp_path, vocab={text: i for i, text in enumerate(vocab.split())}, config={"model_type": "blenderbot-small"})
    (tmp_path / "merges.txt").write_text("#version\n" + "\n".join(merges) + "\n")
    theirs = transformers.BlenderbotSmallTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    ours = folder_tokenizer(tmp_path)
    more = [
        "Hello the WORLD, don't!\nSing (a) song.",
        "xyz xy",
        "hello\n\nthe",
        "__start__ hello __end__the",
        "\u3000the",
    ]
    compare(ours, theirs, [*TEXTS, *more, *HARD], decode=False)
    for text in ("hello the world", "sing, the a"):
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Moses:
    """The part of sacremoses that transformers uses, for one language after another."""

    def __init__(self, lang: str = "en") -> None:
        self.lang = lang

    def normalize(self, text: str) -> str:
        return text.replace(f"<{self.lang}>", "the")

    def tokenize(self, text: str, aggressive_dash_splits: bool, return_str: bool = False, escape: bool = True) -> list:
        assert aggressive_dash_splits and escape and not return_str
        return re.findall(r"\w+|[^\w\s]", text.replace("&", "&amp;"))

    def detokenize(self, words: list[str]) -> str:
        return re.sub(r" (?=[,.!])", "", " ".join([f"({self.lang})", *words]))


@pytest.fixture
def moses(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("sacremoses")
    for name in ("MosesTokenizer", "MosesDetokenizer", "MosesPunctNormalizer"):
        setattr(package, name, Moses)
    monkeypatch.setitem(sys.modules, "sacremoses", package)
    rules.cache_clear()


MERGES = ["t h 9", "th e</w> 8", "h e 7", "l l 6", "he ll 5", "hell o</w> 4", "x y 3", "xy z</w> 2"]
WORDS = (
    'the</w> th hello</w> hell o</w> t h e l e</w> l</w> ,</w> .</w> "</w> 1 2</w> a</w> amp</w> ;</w> &</w> x xyz</w>'
)
SPOKEN = ["The hello, “the”。he １2 & xyz xy", "hello\u200bthe\x00 the", "《the》…", "<en> <de> the", "THE"]


@pytest.mark.parametrize("options", [{}, {"do_lower_case": True}])
def test_fsmt(tmp_path, moses, options):
    module = importlib.import_module("transformers.models.fsmt.tokenization_fsmt")
    source = {text: i for i, text in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS.split()])}
    target = {text: i for i, text in enumerate(["<s>", "<pad>", "</s>", "<unk>", *reversed(WORDS.split())])}
    write(tmp_path, **{"vocab-src": source, "vocab-tgt": target, "config": {"model_type": "fsmt"}})
    (tmp_path / "merges.txt").write_text("\n".join(MERGES) + "\n")
    write(tmp_path, tokenizer_config=options | {"langs": ["en", "de"]})
    theirs = module.FSMTTokenizer.from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD, *SPOKEN])
    write(tmp_path, tokenizer_config={"langs": "en-de"})
    with pytest.raises(CheckpointError, match=r"langs='en-de' of .* must be two languages"):
        folder_tokenizer(tmp_path)


def test_biogpt(tmp_path, moses):
    module = importlib.import_module("transformers.models.biogpt.tokenization_biogpt")
    vocab = {text: i for i, text in enumerate(["<s>", "<pad>", "</s>", "<unk>", *WORDS.split()])}
    write(tmp_path, vocab=vocab, config={"model_type": "biogpt"})
    (tmp_path / "merges.txt").write_text("\n".join(MERGES) + "\n")
    theirs = module.BioGptTokenizer.from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD, *SPOKEN])


def test_roformer(tmp_path, monkeypatch):
    module = importlib.import_module("transformers.models.roformer.tokenization_roformer")
    package = ModuleType("rjieba")

    def cut(text: str, hmm: bool = True) -> list[str]:
        assert not hmm
        return re.findall(r"日本|[a-z]+|\s+|.", text)

    def tokenize(text: str, hmm: bool = True) -> list[tuple[str, int, int]]:
        at, found = 0, []
        for word in cut(text, hmm):
            found.append((word, at, at + len(word)))
            at += len(word)
        return found

    package.cut, package.tokenize = cut, tokenize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rjieba", package)
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the he ##llo hello world 日本 日 本 語 2 ##0 ##2 ##4 , ! a b"
    vocab = {text: i for i, text in enumerate(words.split())}
    theirs = module.RoFormerTokenizer(vocab=vocab)
    texts = [*TEXTS, *HARD, "日本語the日", "the [MASK] [SEP]a"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    write(tmp_path, config={"model_type": "roformer"})
    compare(folder_tokenizer(tmp_path), theirs, texts)
    theirs.save_pretrained(tmp_path / "saved")  # as if words were not looked for
    compare(folder_tokenizer(tmp_path / "saved"), theirs, texts)


@pytest.mark.parametrize(
    ("name", "package", "files"),
    [
        ("BioGptTokenizer", "sacremoses", {"vocab": {"<unk>": 0, "</s>": 1}}),
        ("FSMTTokenizer", "sacremoses", {"vocab-src": {}, "vocab-tgt": {}}),
        ("RoFormerTokenizer", "rjieba", {"tokenizer": {}}),
    ],
)
def test_a_package_that_is_needed_is_named(tmp_path, monkeypatch, name, package, files):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path, **files, config={}, tokenizer_config={"tokenizer_class": name, "langs": ["en", "de"]})
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(UnknownTokenizer, match=f"needs the package {package}: pip install {package}"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["marian", "bert-generation"])
def test_a_tokenizer_can_be_copied(tmp_path, kind):
    model = small_model(charsmap=MAP)
    put_model(tmp_path, "source.spm" if kind == "marian" else "spiece.model", model)
    write(tmp_path, vocab=lookup_vocab(model, "</s> <unk> <pad>"), config={"model_type": kind})
    tokenizer = folder_tokenizer(tmp_path)
    copied = copy.deepcopy(tokenizer)
    assert [copied.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
