"""Text to ids and back. A thin layer over the `tokenizers` library that also knows the checkpoint's stop ids
and chat template, and can decode one token at a time without ever showing half a character.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lamina.checkpoint.chat.literal import Literal, fuse_parts, special_texts
from lamina.checkpoint.chat.messages import (
    check_messages,
    check_text,
    has_parts,
    short,
    shown_as_text,
    strings,
    with_text,
)
from lamina.checkpoint.chat.template import choose, folder_templates, render
from lamina.checkpoint.tensor_file import refuse_pointer
from lamina.checkpoint.vocab.languages import Languages, languages_of
from lamina.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are not (yet) a character


class UnknownTokenizer(CheckpointError):
    """The tokenizer is of a kind that is not read. The model itself can be loaded, and used with ids."""


class Tokenizer:
    """Encodes, decodes and renders chats.

    `special_tokens` are the texts templates may use (bos_token, eos_token, …); `add_bos` puts the bos id
    first where the backend's own post-processing does not; `languages` are those of a translation model.

    >>> from tokenizers import Tokenizer as Backend, models
    >>> bpe = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    >>> tokenizer = Tokenizer(Backend(bpe), bos_id=1, add_bos=True)
    >>> tokenizer.encode("aab"), tokenizer.encode("aab", special=False)
    ([1, 0, 2], [0, 2])
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        languages: Languages | None = None,
    ) -> None:
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.templates = dict(templates or {})
        self.special_tokens = dict(special_tokens or {})
        self.adds_bos = add_bos
        self._languages = languages
        if languages is not None:
            self._surround(*languages.around())
        self._same_ids: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """For pickles and copies: without what is known of other tokenizers."""
        return {**self.__dict__, "_same_ids": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _same_ids=WeakKeyDictionary())

    def __repr__(self) -> str:
        chat = "with" if self.templates else "without"
        return f"Tokenizer({self.vocab_size} tokens, eos {list(self.eos_ids)}, {chat} chat template)"

    @property
    def vocab_size(self) -> int:
        """How many tokens there are. A model's table may be larger: padded rows that stand for nothing."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def languages(self) -> Mapping[str, int]:
        """Of translation models: the id of each language's token, by code. Empty for others.

        The language to write is a setting of a call: forced_bos_token_id=tokenizer.languages["fr_XX"].
        """
        return {} if self._languages is None else self._languages.ids

    def set_language(self, code: str) -> None:
        """Says which language the texts are in that are encoded from now on: one of `languages`.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> from lamina.checkpoint.vocab.languages import CODE
        >>> backend = Backend(models.WordLevel({"a": 0, "</s>": 1, "en": 2, "de": 3}))
        >>> languages = Languages({"en": 2, "de": 3}, before=(), after=(1, CODE), chosen="en")
        >>> tokenizer = Tokenizer(backend, languages=languages)
        >>> tokenizer.set_language("de")
        >>> tokenizer.encode("a")
        [0, 1, 3]
        """
        if self._languages is None or code not in self._languages.ids:
            known = ", ".join(self.languages) or "none: the tokenizer has no languages"
            raise InputError(f"there is no language {code!r}; there are: {known}")
        self._languages = replace(self._languages, chosen=code)
        self._surround(*self._languages.around())

    def _surround(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Puts ids before and after each text."""
        from tokenizers.processors import TemplateProcessing

        texts = [[str(self.backend.id_to_token(index)) for index in part] for part in (before, after)]
        ids = dict(zip((*texts[0], *texts[1]), (*before, *after), strict=True))
        self.backend.post_processor = TemplateProcessing(
            single=[*texts[0], "$A", *texts[1]], special_tokens=list(ids.items())
        )

    def same_ids(self, other: Tokenizer) -> bool:
        """Whether both give the same ids to the same tokens. Tokens that were added to a vocabulary, such as those of
        chats, may differ.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> one, two = (Tokenizer(Backend(models.BPE({"a": a, "b": 1 - a}, []))) for a in (0, 1))
        >>> one.same_ids(two), one.same_ids(one)
        (False, True)
        """
        if other is self or other.backend is self.backend:
            return True
        if other not in self._same_ids:
            self._same_ids[other] = self.backend.get_vocab(False) == other.backend.get_vocab(False)
        return self._same_ids[other]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text. `special` adds what the model expects around it (bos …): leave it out for the
        result of `chat`, which has written them already. Special tokens spelt in the text are recognized."""
        try:
            ids = self.backend.encode(text, add_special_tokens=special).ids
        except TypeError:  # of the library, for all that is not text
            if not isinstance(text, str):
                raise InputError(f"only text can be encoded, not {short(text)}") from None
            check_text(text, "the text")
            raise
        if special and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids, exactly as the tokens spell it. Ids without a token give nothing."""
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise InputError(f"token id {min(ids)} is negative")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, by the checkpoint's template, as text. Use `chat_ids` for the model's input: in
        this text, special tokens that a message spells and those of the template look the same.

        `template` picks one of several by name; `variables` (tools=, enable_thinking= …) are passed to it.

        >>> from tokenizers import Tokenizer as Backend, models
        >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        >>> tokenizer = Tokenizer(Backend(models.BPE()), templates={"default": template})
        >>> tokenizer.chat([{"role": "user", "content": "Hello"}])
        '<user>Hello<assistant>'
        """
        check_messages(messages)
        return self._render(messages, template, {"add_generation_prompt": add_generation_prompt} | variables)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        allow_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The prompt of a conversation as ids.

        A special token that is spelt in a message, or in a variable such as tools=, becomes ordinary tokens of the same
        text, so that a message cannot pretend to be another one. With allow_special=True it becomes the special token.

        >>> from tokenizers import AddedToken, Tokenizer as Backend, models
        >>> backend = Backend(models.BPE({"<": 0, "e": 1, ">": 2}, []))
        >>> _ = backend.add_special_tokens([AddedToken("<e>")])        # its id is 3
        >>> tokenizer = Tokenizer(backend, templates={"default": "{{ messages[0].content }}<e>"})
        >>> tokenizer.chat_ids([{"role": "user", "content": "e<e>"}])
        [1, 0, 1, 2, 3]
        >>> tokenizer.chat_ids([{"role": "user", "content": "e<e>"}], allow_special=True)
        [1, 3, 3]
        """
        check_messages(messages)
        given = {"add_generation_prompt": add_generation_prompt} | variables
        if not allow_special:
            also = [*self.special_tokens.values(), *map(self.backend.id_to_token, self.eos_ids)]
            special = special_texts(self.backend, also)
            messages = fuse_parts(messages, special)
            foreign = {key: value for key, value in variables.items() if not key.endswith("_token")}
            source = self.templates.get(choose(self.templates, template, given), "")
            if (literal := Literal.of(special, [messages, foreign], source)) is not None:
                marked = literal.mark_all(messages), given | literal.mark_all(foreign)
                return literal.encode(self.backend, self._render(marked[0], template, marked[1], literal))
        return self.encode(self._render(messages, template, given), special=False)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        variables: Mapping[str, Any],
        literal: Literal | None = None,
    ) -> str:
        name = choose(self.templates, template, variables)
        if "messages" in variables:
            raise InputError("chat_options name 'messages', which the template gets from the chat: leave them out")
        for text in strings(variables):
            check_text(text, "a variable of the chat template")
        given = {**self.special_tokens, **variables}

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            return render(name, self.templates[name], {**given, "messages": messages}, literal)

        if has_parts(messages):
            # templates that know text parts get them; others refuse, drop or print the list
            with suppress(InputError):
                if shown_as_text(messages, text := rendered(messages)):
                    return text
            messages = with_text(messages)
        return rendered(messages)

    def stream(self, skip_special: bool = True) -> TextStream:
        """A decoder fed one id at a time."""
        return TextStream(self, skip_special)


class TextStream:
    """Gives the text of a growing list of ids, only in whole characters.

    A character may be spread over several tokens, and a token's leading space may depend on the token before
    it. So each new token is decoded together with those of the last piece shown, and what is new is shown
    unless it ends in an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []  # those of the last piece shown, then those not shown yet
        self._known = 0  # how many of them are shown
        self._shown = ""  # their text

    def put(self, token: int) -> str:
        """The text that became whole with this token, often empty."""
        self._ids.append(int(token))
        text = self._decode()
        if text.endswith(UNFINISHED) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._shown = self._decode()
        return new

    @property
    def held(self) -> str:
        """What is not shown yet; its last character may be unfinished."""
        return self._decode()[len(self._shown) :] if len(self._ids) > self._known else ""

    def fork(self) -> TextStream:
        """A stream of its own that goes on from here."""
        new = TextStream(self._tokenizer, self._skip_special)
        new._ids, new._known, new._shown = list(self._ids), self._known, self._shown
        return new

    def end(self) -> str:
        """What was held back; the stream starts anew."""
        rest = self._decode()[len(self._shown) :]
        self._ids, self._known, self._shown = [], 0, ""
        return rest

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, self._skip_special)


def folder_tokenizer(path: Path, eos_ids: Sequence[int] = ()) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder: tokenizer.json, with the tokens that tokenizer_config.json adds; else that
    of its vocabulary files (`lamina/checkpoint/vocab/`). None if there are none.

    What comes around a text (bos …) is what tokenizer.json says, whatever add_bos_token is, as in transformers."""
    from tokenizers import Tokenizer as Backend

    from lamina.checkpoint.vocab.files import TokenizerFiles  # which imports this module
    from lamina.checkpoint.vocab.kinds import build_tokenizer, class_of, own_files

    file = path / "tokenizer.json"
    if not file.is_file() or own_files(path):
        return build_tokenizer(path, eos_ids)
    refuse_pointer(file)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{file} is not a tokenizer: {error}; copy or download it again") from error
    backend.no_truncation()
    backend.no_padding()
    files = TokenizerFiles(path, eos_ids)
    tokens, options = files.tokens({}, backend.get_added_tokens_decoder().values()), files.options
    files.add_to(backend, tokens)
    backend.encode_special_tokens = bool(options.get("split_special_tokens", False))

    def id_of(kind: str) -> int | None:
        return backend.token_to_id(tokens[kind].content) if kind in tokens else None

    if not eos_ids and (eos := id_of("eos_token")) is not None:
        eos_ids = (eos,)
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        bos_id=id_of("bos_token"),
        templates=folder_templates(path, options),
        special_tokens={
            name: text
            for name in options
            if name.endswith("_token") and (text := token_text(options[name])) is not None
        },
        languages=languages_of(class_of(path, options), options, backend.get_vocab(), id_of("eos_token")),
    )


def token_text(value: Any) -> str | None:
    """A token's text: tokenizer_config.json writes it plainly or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
