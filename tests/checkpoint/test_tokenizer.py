from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from lamina import CheckpointError
from lamina.checkpoint import Tokenizer, open_source
from lamina.checkpoint.tokenizer import UnknownTokenizer, folder_tokenizer
from lamina.errors import InputError
from tests.checkpoint.vocab_files import compare

TEXTS = [
    "Hello world, it's 2024!",
    " leading and trailing  ",
    "naïve café — “quotes” 😀👩‍👩‍👧",
    "日本語 123\n\n\ttabs\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def small_bpe() -> Backend:
    """Byte-level BPE trained on a few sentences."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*TEXTS, "the theory of the thing", "日本語の日本"] * 3, trainer)
    return backend


BACKEND = small_bpe()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("text", TEXTS)
def test_a_folder_encodes_and_decodes_as_its_tokenizer_file_does(folder, text):
    tokenizer = folder_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert ids == BACKEND.encode(text).ids
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode(torch.tensor(ids, dtype=torch.long)) == BACKEND.decode(ids)
    assert tokenizer.vocab_size == BACKEND.get_vocab_size()


def test_special_adds_what_the_post_processor_adds(folder):
    backend = Backend.from_str(BACKEND.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.encode("hi") == [1, *tokenizer.encode("hi", special=False)]


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
ADDED = {
    "320": FLAGS | {"content": "<new>", "special": True},
    "321": FLAGS | {"content": "<left>", "lstrip": True},
    "322": FLAGS | {"content": "<right>", "rstrip": True},
    "323": FLAGS | {"content": "<word>", "single_word": True, "normalized": True},
}
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    "config",
    [
        NAMED,
        *(NAMED | {"add_bos_token": bos, "add_eos_token": True} for bos in (True, False, None)),
        NAMED | {"pad_token": "[PAD]", "unk_token": "<new>"},
        NAMED | {"added_tokens_decoder": ADDED},
        NAMED | {"added_tokens_decoder": {"900": ADDED["320"], "321": ADDED["322"]}},  # ids follow the vocabulary
        NAMED | {"extra_special_tokens": ["<new>", "<left>"]},
        {"additional_special_tokens": ["<right>"]},
        {"extra_special_tokens": {"image_token": "<new>"}},
        {"image_token": "<left>"},
        {"mask_token": "<mask>"},
        {"split_special_tokens": True},
    ],
)
@pytest.mark.parametrize("around", [False, True])
def test_ids_and_text_are_those_of_transformers_whatever_the_configuration_says(folder, config, around):
    import transformers

    backend = Backend.from_str(BACKEND.to_str())
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    backend.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    compare(folder_tokenizer(folder), theirs, [*TEXTS, *ODD])


ODD = [
    "<|im_start|>hi", "a <new> b<new>", "x <left> y <left>", "x <right> y<right>  z", "a <word> b<word>c",
    "[PAD] a[PAD]", " <mask> a<mask>", "<|im_end|> <|endoftext|>", "e\u0301\u0301", " ", "\n\n a", "a" * 500,
]  # fmt: skip


@pytest.mark.parametrize("decoder", [False, True])
def test_older_files_add_tokens_unless_the_configuration_lists_them(folder, decoder):
    import transformers

    write(folder, "special_tokens_map.json", NAMED | {"additional_special_tokens": ["<left>"], "pad_token": "<new>"})
    write(folder, "added_tokens.json", {"<new>": 320, "<word>": 321})
    listed = {"added_tokens_decoder": {"320": ADDED["322"]}} if decoder else {}
    write(folder, "tokenizer_config.json", listed | {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    compare(folder_tokenizer(folder), theirs, [*TEXTS, *ODD])


def test_a_tokenizer_file_that_is_a_pointer_is_named_as_such(tmp_path):
    write(tmp_path, "tokenizer.json", "version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="is a pointer of Git LFS"):
        folder_tokenizer(tmp_path)


def test_truncation_and_padding_stored_in_the_file_are_left_out(folder):
    backend = Backend.from_str(BACKEND.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    assert folder_tokenizer(folder).encode(TEXTS[0]) == BACKEND.encode(TEXTS[0]).ids


def test_eos_ids_come_from_the_configurations_or_else_from_the_token(save_folder, folder):
    save_folder({"a": torch.ones(1)}, {"eos_token_id": [2, 0]})
    assert open_source(folder).tokenizer().eos_ids == (2, 0)
    save_folder({"a": torch.ones(1)})
    assert open_source(folder).tokenizer().eos_ids == ()
    token = {"content": "<|im_end|>", "lstrip": False, "__type": "AddedToken"}
    write(folder, "tokenizer_config.json", {"eos_token": token, "pad_token": None})
    tokenizer = open_source(folder).tokenizer()
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}


def test_a_folder_without_tokenizer_gives_none_and_other_kinds_are_named(tmp_path):
    assert folder_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is not a SentencePiece model"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UnknownTokenizer, match=r"has vocab\.json but no tokenizer\.json"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        folder_tokenizer(tmp_path)


def test_ids_without_a_token_give_nothing_and_negative_ids_are_refused():
    tokenizer = Tokenizer(BACKEND)
    assert tokenizer.decode([*tokenizer.encode("hi"), 99999]) == "hi"
    with pytest.raises(InputError, match="token id -1 is negative"):
        tokenizer.decode([-1])


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special)
    return [stream.put(i) for i in ids] + [stream.end()]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20))
def test_a_stream_gives_the_whole_text_and_never_half_a_character(text):
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    tokenizer = Tokenizer(BACKEND)
    pieces = streamed(tokenizer, tokenizer.encode(text), skip_special=False)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_stream_holds_a_character_back_until_its_last_byte():
    tokenizer = Tokenizer(BACKEND)
    ids = tokenizer.encode("a😀b")
    pieces = streamed(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "😀", "b"]
    assert len(ids) > 3


def test_the_end_of_a_stream_gives_what_was_held_back():
    tokenizer = Tokenizer(BACKEND)
    first = tokenizer.encode("😀")[0]
    stream = tokenizer.stream()
    assert stream.put(first) == ""
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"
    assert stream.put(tokenizer.encode("x")[0]) == "x"


def test_bytes_that_are_no_character_do_not_stop_a_stream():
    tokenizer = Tokenizer(BACKEND)
    first, letter = tokenizer.encode("😀")[0], tokenizer.encode("x")[0]
    assert "".join(streamed(tokenizer, [first, letter, letter])) == "\N{REPLACEMENT CHARACTER}xx"


def spaced_bpe() -> Backend:
    """SentencePiece-like: a token carries its leading space, which is dropped at the start of a text."""
    tokens = ["<unk>", "</s>", "▁a", "▁b", "c", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("</s>")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([[1], [2], [3], [4], *([5 + b for b in c.encode()] for c in "é😀x€")]), max_size=8))
def test_a_stream_keeps_spaces_between_tokens_and_joins_byte_tokens(groups):
    ids = [i for group in groups for i in group]
    tokenizer = Tokenizer(spaced_bpe())
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


MESSAGES = [{"role": "user", "content": "Is 1 < 2?"}, {"role": "assistant", "content": "Yes."}]
CHATML = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_chat_is_rendered_as_transformers_renders_it(folder):
    import transformers

    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write(folder, "tokenizer_config.json", config)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    for template in (
        CHATML,
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}{{ eos_token }}",
        "{{ tools | tojson(indent=2) if tools else 'none' }}{{ strftime_now('%Y') }}",
    ):
        write(folder, "chat_template.jinja", template)
        tokenizer = folder_tokenizer(folder)
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            assert tokenizer.chat(MESSAGES, add_generation_prompt=prompt) == expected


def test_named_templates_are_chosen_by_name_and_by_tools(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    write(folder, "additional_chat_templates/rag.jinja", "{{ documents }}")
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.chat(MESSAGES) == "plain"
    assert tokenizer.chat(MESSAGES, tools=["t"]) == "t"
    assert tokenizer.chat(MESSAGES, template="rag", documents="d") == "d"
    with pytest.raises(InputError, match=r"no chat template 'odd'; there are: default, rag, tool_use"):
        tokenizer.chat(MESSAGES, template="odd")


def test_the_template_file_wins_over_the_tokenizer_configuration(folder):
    write(folder, "processor_config.json", {"chat_template": "oldest"})
    assert folder_tokenizer(folder).chat(MESSAGES) == "oldest"
    write(folder, "tokenizer_config.json", {"chat_template": "old"})
    assert folder_tokenizer(folder).chat(MESSAGES) == "old"
    write(folder, "chat_template.json", {"chat_template": "newer"})
    assert folder_tokenizer(folder).chat(MESSAGES) == "newer"
    write(folder, "chat_template.jinja", "newest")
    assert folder_tokenizer(folder).chat(MESSAGES) == "newest"


def test_templates_by_name_may_be_an_object_and_odd_ones_are_refused(folder):
    write(folder, "processor_config.json", {"chat_template": {"default": "a", "rag": "b"}})
    assert folder_tokenizer(folder).templates == {"default": "a", "rag": "b"}
    for odd in (5, ["a"], [{"name": "a"}], {"a": None}):
        write(folder, "chat_template.json", {"chat_template": odd})
        with pytest.raises(
            CheckpointError, match=r"chat_template in .*chat_template\.json is neither a text nor a list"
        ):
            folder_tokenizer(folder)


def test_a_template_may_refuse_messages_and_may_not_leave_the_sandbox():
    tokenizer = Tokenizer(BACKEND, templates={"default": CHATML, "odd": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(InputError, match="the chat template 'default' refused these messages: no tools here"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    with pytest.raises(InputError, match="refused"):
        tokenizer.chat(MESSAGES, template="odd")


def test_a_checkpoint_without_template_says_so():
    with pytest.raises(CheckpointError, match="the checkpoint has no chat template"):
        Tokenizer(BACKEND).chat(MESSAGES)
