"""Tokenizers with a plain list of tokens give the ids that transformers' classes give for the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from lamina.checkpoint.tokenizer import folder_tokenizer
from tests.checkpoint.vocab_files import HARD, TEXTS, compare, write


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
        ("MvpTokenizer", {}),
        ("GPTNeoXTokenizer", {}),
        ("GPTNeoXTokenizer", {"add_bos_token": True, "extra_special_tokens": ["<more>"]}),
        ("CohereTokenizer", {"image_token": "<new>"}),
    ],
)
def test_byte_level_files(tmp_path, byte_level, name, options):
    copy_files(byte_level, tmp_path)
    write(tmp_path, tokenizer_config=options | {"tokenizer_class": name})
    theirs = getattr(transformers, name).from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD, "a <|endoftext|>b<|im_end|> <new><more>"])


@pytest.mark.parametrize(
    ("family", "name"),
    [("olmo", "GPTNeoX"), ("mamba2", "GPTNeoX"), ("cohere2", "Cohere"), ("mvp", "Roberta"), ("qwen3_next", "Qwen2")],
)
def test_a_folder_without_a_class_has_that_of_its_family(tmp_path, byte_level, family, name):
    copy_files(byte_level, tmp_path)
    write(tmp_path, config={"model_type": family})
    theirs = getattr(transformers, f"{name}Tokenizer").from_pretrained(tmp_path)
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD])


def test_qwen3_5(tmp_path, byte_level):
    copy_files(byte_level, tmp_path)
    write(tmp_path, config={"model_type": "qwen3_5"})
    files = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    theirs = transformers.Qwen3_5Tokenizer(*files)  # from the folder it reads no vocabulary
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD])


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
    compare(folder_tokenizer(tmp_path), theirs, [*TEXTS, *HARD, "the [MASK] [SEP]a[NEW] b"])


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
