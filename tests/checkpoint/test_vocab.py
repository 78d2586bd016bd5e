"""Tokenizers from vocabulary files give the ids that transformers' classes give for the same files."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from lamina import CheckpointError, InputError
from lamina.checkpoint.tokenizer import Tokenizer, UnknownTokenizer, folder_tokenizer
from lamina.checkpoint.vocab.languages import NLLB
from lamina.checkpoint.vocab.sentencepiece import read_model
from tests.checkpoint.spm import BPE, CONTROL, UNIGRAM, UNUSED, Spm, charsmap, small_model

TEXTS = [
    "",
    " ",
    "hello the world",
    "The Hello, world! 2024",
    "  two  spaces   and\ttabs\nand lines \n",
    "café naïve cafe\u0301",
    "emoji 😀👩‍👩‍👧 end",
    "日本語 123 한국어",
    "a<user>b </s> singing<unk>",
    "don't (stop), please... “quotes”",
    "ﬁne ｆｕｌｌ",
    "QZ unknownQQ letters",
    "x <mask> y<mask>",
    "<s>the<s> <pad>",
]
MAP = charsmap({"ﬁ": "fi", "ｆ": "f", "ｌ": "l", "\t": " ", "\n": " ", "e\u0301": "é", "“": '"'})
SPM: dict[str, Spm] = {}


@pytest.fixture(autouse=True)
def read_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives transformers what was written, which it reads with packages that are not installed here."""

    def extractor(self: Any, model: str) -> None:
        self.proto = SPM[str(model)].proto()

    module = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(module.SentencePieceExtractor, "__init__", extractor)


class Processor:
    """The part of sentencepiece.SentencePieceProcessor that transformers uses."""

    def __init__(self, **options: object) -> None:
        pass

    def Load(self, path: str) -> None:
        self.model = SPM[str(path)]
        self.texts = [text for text, *_ in self.model.pieces]
        self.ids = {text: i for i, text in enumerate(self.texts)}

    def encode(self, text: str, out_type: type = int) -> list[Any]:
        return self.model.encode(text)

    def decode(self, pieces: list[str]) -> str:
        return "".join(pieces).replace("▁", " ").removeprefix(" ")

    decode_pieces = decode

    def PieceToId(self, text: str) -> int:
        return self.ids.get(text, self.model.unk_id)

    piece_to_id = PieceToId

    def IdToPiece(self, index: int) -> str:
        return self.texts[index]

    def get_piece_size(self) -> int:
        return len(self.texts)

    __len__ = get_piece_size


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("sentencepiece")
    package.SentencePieceProcessor = Processor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", package)
    base = importlib.import_module("transformers.tokenization_utils_sentencepiece")
    monkeypatch.setattr(base, "requires_backends", lambda *given: None)
    monkeypatch.setattr(base, "spm", package, raising=False)


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def put_model(folder: Path, name: str, model: Spm) -> Path:
    SPM[str(folder / name)] = model
    return model.write(folder / name)


def compare(ours: Tokenizer | None, theirs: Any, texts: list[str] = TEXTS, decode: bool = True) -> None:
    assert ours is not None
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        if decode:
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special=skip) == expected, text


FAIRSEQ = "<unk> <s> </s>"
NO_MAP = ("llama", "mbart")
CASES = {
    "llama": ("LlamaTokenizer", "tokenizer.model", BPE, FAIRSEQ, {"add_bos_token": True}),
    "llama legacy": ("LlamaTokenizer", "tokenizer.model", BPE, FAIRSEQ, {"legacy": True, "add_eos_token": True}),
    "t5": ("T5Tokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {}),
    "t5 ids": ("T5Tokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {"extra_ids": 3}),
    "pegasus": ("PegasusTokenizer", "spiece.model", UNIGRAM, "<pad> </s> <unk>", {}),
    "xlm-roberta": ("XLMRobertaTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "camembert": ("CamembertTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "mbart": ("MBartTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {}),
    "mbart de": ("MBartTokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {"src_lang": "de_DE"}),
    "mbart50": ("MBart50Tokenizer", "sentencepiece.bpe.model", UNIGRAM, FAIRSEQ, {"src_lang": "fr_XX"}),
    "nllb": ("NllbTokenizer", "sentencepiece.bpe.model", BPE, FAIRSEQ, {"src_lang": "deu_Latn"}),
    "nllb legacy": ("NllbTokenizer", "sentencepiece.bpe.model", BPE, FAIRSEQ, {"legacy_behaviour": True}),
}


# with a map of characters too, except where transformers leaves it out
@pytest.mark.parametrize(
    ("case", "mapped"),
    [(case, mapped) for case in CASES for mapped in (False, True) if not mapped or case.split()[0] not in NO_MAP],
)
def test_sentencepiece_files(tmp_path, case, mapped):
    name, file, kind, first, options = CASES[case]
    model = small_model(kind, first, charsmap=MAP if mapped else b"", byte_fallback=name == "LlamaTokenizer")
    put_model(tmp_path, file, model)
    if name == "NllbTokenizer":  # else transformers adds no codes
        codes = [*NLLB, "<mask>"]
        first_id = len(model.pieces) + 1
        listed = {first_id + i: {"content": text, "special": True} for i, text in enumerate(codes)}
        options = options | {"added_tokens_decoder": listed}
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs)


@pytest.mark.parametrize(
    ("name", "kind", "code", "options"),
    [
        ("MBartTokenizer", UNIGRAM, "de_DE", {}),
        ("MBart50Tokenizer", UNIGRAM, "sl_SI", {"src_lang": "fr_XX"}),
        ("NllbTokenizer", BPE, "deu_Latn", {}),
        ("NllbTokenizer", BPE, "deu_Latn", {"legacy_behaviour": True, "src_lang": "fra_Latn"}),
    ],
)
@pytest.mark.parametrize("json_file", [False, True])
def test_the_language_of_texts_can_be_changed(tmp_path, name, kind, code, options, json_file):
    model = small_model(kind)
    put_model(tmp_path, "sentencepiece.bpe.model", model)
    if name == "NllbTokenizer":
        first_id = len(model.pieces) + 1
        listed = {first_id + i: {"content": text, "special": True} for i, text in enumerate([*NLLB, "<mask>"])}
        options = options | {"added_tokens_decoder": listed}
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name, "eos_token": "</s>"})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    if json_file:
        theirs.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs, TEXTS[:4])
    theirs.src_lang = code
    ours.set_language(code)
    compare(ours, theirs, TEXTS[:4])
    assert ours.languages[code] == theirs.convert_tokens_to_ids(code)
    with pytest.raises(InputError, match="there is no language 'xx'; there are: a"):
        ours.set_language("xx")


def test_nllb_codes_follow_the_pieces_and_the_mask_comes_last(tmp_path):
    model = small_model(BPE)
    put_model(tmp_path, "sentencepiece.bpe.model", model)
    write(tmp_path, tokenizer_config={"tokenizer_class": "NllbTokenizer", "src_lang": "zul_Latn"})
    ids = folder_tokenizer(tmp_path).encode("<mask>ace_Arab")
    first = len(model.pieces) + 1
    assert ids == [first + len(NLLB) - 1, first + len(NLLB), first, 2]


@pytest.mark.parametrize("name", ["MBartTokenizer", "XLMRobertaTokenizer"])
def test_mbart_normalizes_characters_as_its_model_says(tmp_path, name):
    put_model(tmp_path, "sentencepiece.bpe.model", small_model(charsmap=MAP))
    write(tmp_path, tokenizer_config={"tokenizer_class": name})
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.encode("ﬁne ｆｕｌ", special=False) == tokenizer.encode("fine fｕl", special=False)


@pytest.mark.parametrize("kind", [UNIGRAM, BPE])
@pytest.mark.parametrize("options", [{}, {"dummy_prefix": False}, {"collapse": False}])
def test_a_model_of_unknown_class_is_cut_as_sentencepiece_does(tmp_path, kind, options):
    model = small_model(kind, **options)
    put_model(tmp_path, "tokenizer.model", model)
    write(tmp_path, tokenizer_config={"tokenizer_class": "SomeTokenizer", "add_bos_token": True})
    tokenizer = folder_tokenizer(tmp_path)
    ids = {text: i for i, (text, *_) in enumerate(model.pieces)}
    for text in TEXTS:
        if "<" in text:
            continue
        pieces = model.encode(text)
        assert tokenizer.encode(text) == [1, *(ids.get(piece, 0) for piece in pieces)], text
        if all(piece in ids for piece in pieces):
            assert tokenizer.decode(tokenizer.encode(text)) == "".join(pieces).replace("▁", " ").removeprefix(
                " " if model.dummy_prefix else ""
            )


@pytest.mark.parametrize("kind", [UNIGRAM, BPE])
def test_unknown_characters_become_bytes_and_come_back(tmp_path, kind):
    put_model(tmp_path, "tokenizer.model", small_model(kind, byte_fallback=True))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello 😀 QZ")) == "hello 😀 QZ"
    stream = tokenizer.stream()
    assert "".join(map(stream.put, tokenizer.encode("a 😀"))) + stream.end() == "a 😀"


def test_gemma(tmp_path):
    model = small_model(BPE, "<pad> <eos> <bos> <unk> <mask>", byte_fallback=True)
    put_model(tmp_path, "tokenizer.model", model)
    options = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
    write(tmp_path, tokenizer_config=options)
    vocab = {text: i for i, (text, *_) in enumerate(model.pieces)}
    vocab["\t"] = vocab.pop("<0x09>")
    merges = importlib.import_module("transformers.tokenization_utils_base").generate_merges(vocab)
    theirs = transformers.GemmaTokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=["<user>"], add_bos_token=True
    )
    compare(folder_tokenizer(tmp_path), theirs, [text for text in TEXTS if "<user>" not in text])


def test_xglm(tmp_path):
    model = small_model(charsmap=MAP)
    put_model(tmp_path, "sentencepiece.bpe.model", model)
    write(tmp_path, config={"model_type": "xglm"})
    first = [(text, 0.0) for text in ("<s>", "<pad>", "</s>", "<unk>")]
    made_up = [(f"<madeupword{i}>", 0.0) for i in range(7)]
    scores = [(piece.piece, piece.score) for piece in model.proto().pieces[3:]]
    theirs = transformers.XGLMTokenizer(vocab=[*first, *scores, *made_up], _spm_precompiled_charsmap=MAP)
    compare(folder_tokenizer(tmp_path), theirs, [text for text in TEXTS if "<user>" not in text])


def lookup_vocab(model: Spm, first: str) -> dict[str, int]:
    """Another order of ids; some pieces have none."""
    texts = [text for text, _, kind in model.pieces if kind not in (CONTROL, UNUSED)][1:]
    kept = [text for i, text in enumerate(sorted(texts)) if i % 7]
    return {text: i for i, text in enumerate([*first.split(), *kept, ">>fr<<"])}


@pytest.mark.filterwarnings("ignore:Recommended")
@pytest.mark.parametrize("kind", [UNIGRAM, BPE])
def test_marian(tmp_path, processor, kind):
    module = importlib.import_module("transformers.models.marian.tokenization_marian")
    source, target = small_model(kind), small_model(UNIGRAM)
    source.pieces.append(("▁hello", 5.0, UNUSED))
    vocab = lookup_vocab(source, "</s> <unk>") | {"<pad>": 500}
    write(tmp_path, vocab=vocab, config={"model_type": "marian"})
    files = [str(put_model(tmp_path, f"{n}.spm", m)) for n, m in (("source", source), ("target", target))]
    theirs = module.MarianTokenizer(*files, str(tmp_path / "vocab.json"))
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs, [*TEXTS, ">>fr<< the world", ">>xx<<the", ">> the"], decode=False)
    assert ours.eos_ids == (0,)
    for text in ("hello the world", "The Hello, world!"):
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


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
    compare(ours, theirs, decode=False)
    ids = [theirs.target_encoder[text] for text in ("▁the", "▁world", "!") if text in theirs.target_encoder]
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("options", [{}, {"src_lang": "fr"}, {"language_codes": "wmt21", "src_lang": "de"}])
def test_m2m_100(tmp_path, processor, options):
    module = importlib.import_module("transformers.models.m2m_100.tokenization_m2m_100")
    model = small_model(BPE)
    vocab = lookup_vocab(model, "<s> <pad> </s> <unk>")
    write(tmp_path, vocab=vocab, tokenizer_config=options | {"tokenizer_class": "M2M100Tokenizer"})
    spm = put_model(tmp_path, "sentencepiece.bpe.model", model)
    codes = [f"__{code}__" for code in module.FAIRSEQ_LANGUAGE_CODES[options.get("language_codes", "m2m100")]]
    theirs = module.M2M100Tokenizer(  # the codes as published folders list them
        str(tmp_path / "vocab.json"), str(spm), additional_special_tokens=codes, **options
    )
    ours = folder_tokenizer(tmp_path)
    compare(ours, theirs, [*TEXTS, "__de__ the"], decode=False)
    ids = theirs("the hello world!")["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.languages["de"] == theirs.get_lang_id("de")
    ours.set_language("ja")
    theirs.src_lang = "ja"
    compare(ours, theirs, decode=False)


@pytest.mark.parametrize("options", [{}, {"src_lang": "python"}, {"language_codes": "multi"}])
def test_plbart(tmp_path, processor, options):
    module = importlib.import_module("transformers.models.plbart.tokenization_plbart")
    spm = put_model(tmp_path, "sentencepiece.bpe.model", small_model(BPE))
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": "PLBartTokenizer"})
    theirs = module.PLBartTokenizer(str(spm), **options)
    compare(folder_tokenizer(tmp_path), theirs, [t for t in TEXTS if "<" not in t], decode=False)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json and merges.txt of a byte-level BPE."""
    folder = tmp_path_factory.mktemp("bytes")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.model.save(str(folder))
    return folder


def copy_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "special": True}
WHISPER = [
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|notimestamps|>",
    "<|0.00|>",
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2Tokenizer", {}),
        ("GPT2Tokenizer", {"add_bos_token": True, "bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}),
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("GPT2Tokenizer", {"pad_token": "<new>", "extra_special_tokens": ["<more>"]}),
        ("CodeGenTokenizer", {}),
        ("Qwen2Tokenizer", {"added_tokens_decoder": {330: {"content": "<|im_end|>", "special": True}}}),
        ("RobertaTokenizer", {}),
        ("RobertaTokenizer", {"add_prefix_space": True, "mask_token": MASK}),
        ("BartTokenizer", {}),
    ],
)
def test_byte_level_files(tmp_path, byte_level, name, options):
    copy_files(byte_level, tmp_path)
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, "a <|endoftext|>b<|im_end|> <new><more>"])


@pytest.mark.parametrize("options", [{}, {"language": "de", "task": "translate"}, {"predict_timestamps": True}])
@pytest.mark.parametrize("legacy", [False, True])
def test_whisper(tmp_path, byte_level, options, legacy):
    copy_files(byte_level, tmp_path)
    if legacy:
        write(tmp_path, added_tokens={text: 330 + i for i, text in enumerate(WHISPER)})
        write(tmp_path, special_tokens_map={"additional_special_tokens": WHISPER[:-1], "eos_token": "<|endoftext|>"})
    else:
        listed = {330 + i: {"content": text, "special": i < 6} for i, text in enumerate(WHISPER)}
        options = options | {"added_tokens_decoder": listed}
    write(tmp_path, tokenizer_config=options, config={"model_type": "whisper"})
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    ours = folder_tokenizer(tmp_path)
    if "language" in options:  # theirs counts the position in the list of all languages
        theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path, language="en", task="translate")
        assert ours.encode("a")[1] == 332
        assert ours.encode("a")[2:] == theirs("a")["input_ids"][2:]
        return
    compare(ours, theirs, [*TEXTS, "<|startoftranscript|> a<|0.00|> b<|de|>"], decode=False)


def test_blenderbot(tmp_path, byte_level):
    copy_files(byte_level, tmp_path)
    write(tmp_path, config={"model_type": "blenderbot"})
    theirs = transformers.BlenderbotTokenizer.from_pretrained(tmp_path, add_eos_token=True)
    compare(folder_tokenizer(tmp_path), theirs)


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
    compare(ours, theirs, [*TEXTS, *more], decode=False)
    for text in ("hello the world", "sing, the a"):
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
        {"do_lower_case": False, "strip_accents": True, "extra_special_tokens": ["[NEW]"]},
    ],
)
@pytest.mark.parametrize("name", ["BertTokenizer", "ElectraTokenizer", "DistilBertTokenizerFast"])
def test_bert(tmp_path, options, name):
    words = (
        "[PAD] [UNK] [CLS] [SEP] [MASK] the hello Hello world ##ing sing caf ##e ##é nai ##ve 2 ##0 ##2 ##4 , ! ? . ' "
        "a b don t 日 本 語 ##本"
    )
    (tmp_path / "vocab.txt").write_text("\n".join(words.split()) + "\n")
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name})
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, "the [MASK] [SEP]a[NEW] b"])


def test_openai_gpt(tmp_path):
    merges = ["t h", "th e</w>", "h e", "l l", "he ll", "hell o</w>"]
    texts = [
        "<unk>",
        *"thelo",
        *(f"{letter}</w>" for letter in "thelo,!"),
        "th",
        "the</w>",
        "he",
        "ll",
        "hell",
        "hello</w>",
    ]
    write(tmp_path, vocab={text: i for i, text in enumerate(texts)}, config={"model_type": "openai-gpt"})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    theirs = transformers.OpenAIGPTTokenizer.from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs)


@pytest.mark.parametrize("cut", [0, 3, 50, -1])
def test_a_broken_sentencepiece_file_is_refused(tmp_path, cut):
    path = small_model().write(tmp_path / "tokenizer.model")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is (cut short or )?not a SentencePiece model"):
        folder_tokenizer(tmp_path)


def test_the_reader_gives_what_was_written(tmp_path):
    written = small_model(BPE, charsmap=MAP, byte_fallback=True, dummy_prefix=False, collapse=False)
    model = read_model(written.write(tmp_path / "x.model"))
    assert [(piece.text, piece.type) for piece in model.pieces] == [(text, kind) for text, _, kind in written.pieces]
    assert [piece.score for piece in model.pieces] == pytest.approx([score for _, score, _ in written.pieces])
    assert (model.kind, model.unk_id, model.byte_fallback, model.charsmap) == (BPE, 0, True, MAP)
    assert not model.dummy_prefix and not model.collapse_spaces


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write(tmp_path, vocab={"a": 0}, config={"model_type": "marian"})
    small_model().write(tmp_path / "source.spm")
    with pytest.raises(CheckpointError, match=r"the tokenizer files of .* do not fit together: KeyError: '</s>'"):
        folder_tokenizer(tmp_path)


def test_what_is_missing_or_unknown_is_named(tmp_path):
    write(tmp_path, vocab={"a": 0}, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(CheckpointError, match=r"has no merges\.txt, which a GPT2Tokenizer needs"):
        folder_tokenizer(tmp_path)
    write(tmp_path, tokenizer_config={"tokenizer_class": "BioGptTokenizer"})
    with pytest.raises(
        UnknownTokenizer, match=r"has vocab\.json but no tokenizer\.json, .* class BioGptTokenizer, .*not read"
    ):
        folder_tokenizer(tmp_path)
    small_model().write(tmp_path / "spiece.model")
    write(
        tmp_path,
        tokenizer_config={"tokenizer_class": "T5Tokenizer", "added_tokens_decoder": {"9000": {"content": "<x>"}}},
    )
    with pytest.raises(CheckpointError, match=r"gives the added token '<x>' the id 9000, and the vocabulary \d+"):
        folder_tokenizer(tmp_path)
