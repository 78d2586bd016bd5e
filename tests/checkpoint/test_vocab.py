"""Tokenizers whose vocabulary is a SentencePiece model give the ids that transformers' classes give."""

from __future__ import annotations

import importlib

import pytest
import transformers

from lamina import CheckpointError, InputError
from lamina.checkpoint.tokenizer import UnknownTokenizer, folder_tokenizer
from lamina.checkpoint.vocab.languages import NLLB
from lamina.checkpoint.vocab.sentencepiece import read_model
from tests.checkpoint.spm import BPE, UNIGRAM, small_model
from tests.checkpoint.vocab_files import HARD, MAP, TEXTS, compare, put_model, write

pytestmark = pytest.mark.usefixtures("read_by_transformers")

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
    compare(ours, theirs, [*TEXTS, *HARD])


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
    write(tmp_path, tokenizer_config={"tokenizer_class": "OddTokenizer"})
    with pytest.raises(
        UnknownTokenizer, match=r"has vocab\.json but no tokenizer\.json, .* class OddTokenizer, .*not read"
    ):
        folder_tokenizer(tmp_path)
    small_model().write(tmp_path / "spiece.model")
    write(
        tmp_path,
        tokenizer_config={"tokenizer_class": "T5Tokenizer", "added_tokens_decoder": {"9000": {"content": "<x>"}}},
    )
    with pytest.raises(CheckpointError, match=r"gives the added token '<x>' the id 9000, and the vocabulary \d+"):
        folder_tokenizer(tmp_path)
