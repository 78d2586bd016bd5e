"""What a folder says about its tokenizer beside the vocabulary: options, special tokens, added tokens.

They are in tokenizer_config.json; in older folders also in special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.checkpoint.chat.template import folder_templates
from lamina.checkpoint.folder import read_json
from lamina.checkpoint.tokenizer import Tokenizer, token_text
from lamina.checkpoint.vocab.languages import CODE, Languages
from lamina.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


LANGUAGE = ""  # stands for the token of the language in what comes around a text


class TokenizerFiles:
    """The files of one folder.

    options  tokenizer_config.json, with special_tokens_map.json where that has no added_tokens_decoder
    added    tokens that were added to the vocabulary, by id
    """

    def __init__(self, path: Path, eos_ids: Sequence[int] = ()) -> None:
        self.path, self.eos_ids = path, tuple(eos_ids)
        self.options = read_optional(path / "tokenizer_config.json")
        self.added: dict[int, AddedToken] = {}
        if isinstance(listed := self.options.get("added_tokens_decoder"), dict):
            self.added = {int(index): added_token(token) for index, token in listed.items()}
        else:
            self.options |= read_optional(path / "special_tokens_map.json")
            special = {token_text(self.options.get(name)) for name in NAMED_TOKENS} | set(map(token_text, self.extra))
            for text, index in read_optional(path / "added_tokens.json").items():
                self.added[index] = added_token(text, special=text in special)

    @property
    def extra(self) -> list[Any]:
        """Special tokens besides those of `NAMED_TOKENS`: with names such as image_token, and without."""
        named = [
            value
            for name, value in self.options.items()
            if name.endswith("_token") and name not in NAMED_TOKENS and token_text(value) is not None
        ]
        listed = self.options.get("extra_special_tokens") or self.options.get("additional_special_tokens") or []
        return [*named, *(listed.values() if isinstance(listed, dict) else listed)]

    def named(self, name: str) -> Path:
        """A file that the tokenizer needs."""
        if not (file := self.path / name).is_file():
            raise CheckpointError(f"{self.path} has no {name}, which a {self.options.get('tokenizer_class')} needs")
        return file

    def tokens(self, defaults: Mapping[str, Any], stored: Iterable[AddedToken] = ()) -> dict[str, AddedToken]:
        """The special tokens by name: what the files say, else `defaults`. A null means that there is none.

        stored  tokens of tokenizer.json, whose flags count if no added_tokens_decoder says others
        """
        known = {token.content: token for token in (*stored, *self.added.values())}
        found = {}
        for name in NAMED_TOKENS:
            value = self.options[name] if name in self.options else defaults.get(name)
            if (text := token_text(value)) is None and not hasattr(value, "content"):
                continue
            found[name] = known.get(text or "") or added_token(value, special=True)
        return found

    def add_to(
        self, backend: Backend, tokens: Mapping[str, AddedToken], extra: Iterable[str | AddedToken] = ()
    ) -> None:
        """Adds tokens to a backend that it does not have: those with an id, then special ones, then `extra`."""
        backend.add_tokens([self.added[index] for index in sorted(self.added)])
        known = {token.content for token in self.added.values()}
        listed = [*tokens.values(), *(added_token(token, special=True) for token in (*extra, *self.extra))]
        backend.add_tokens([token for token in listed if token.content not in known])

    def finish(
        self,
        backend: Backend,
        tokens: Mapping[str, AddedToken],
        *,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        extra: Iterable[str | AddedToken] = (),
        languages: Mapping[str, str] | None = None,
        language: str | None = None,
        make: type[Tokenizer] = Tokenizer,
        **more: Any,
    ) -> Tokenizer:
        """Adds the tokens to the backend, and makes a tokenizer of it.

        before     texts of tokens that come before each text
        after      texts of tokens that come after it
        extra      more tokens, special if given as text
        languages  of translation models, the token of each language by code; LANGUAGE stands for it in before and after
        language   the code of the language that texts are in, unless the option src_lang names one
        """
        from tokenizers.processors import TemplateProcessing

        self.add_to(backend, tokens, extra)
        for index, token in self.added.items():
            if (own := backend.token_to_id(token.content)) != index:
                raise CheckpointError(
                    f"{self.path} gives the added token {token.content!r} the id {index}, and the vocabulary {own}"
                )
        if languages is not None:
            more["languages"] = self._languages(backend, languages, language, before, after)
        elif before or after:
            ids = {text: self._id(backend, text) for text in (*before, *after)}
            backend.post_processor = TemplateProcessing(
                single=[*before, "$A", *after], special_tokens=list(ids.items())
            )
        texts = {name: token.content for name, token in tokens.items()}
        eos, bos = texts.get("eos_token"), texts.get("bos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        return make(
            backend,
            eos_ids=self.eos_ids or (() if eos_id is None else (eos_id,)),
            bos_id=None if bos is None else backend.token_to_id(bos),
            templates=folder_templates(self.path, self.options),
            special_tokens=texts,
            **more,
        )

    def _languages(
        self,
        backend: Backend,
        tokens: Mapping[str, str],
        language: str | None,
        before: Sequence[str],
        after: Sequence[str],
    ) -> Languages:
        def all_ids(texts: Sequence[str]) -> tuple[int, ...]:
            return tuple(CODE if text == LANGUAGE else self._id(backend, text) for text in texts)

        ids = {code: self._id(backend, text) for code, text in tokens.items()}
        chosen = self.options.get("src_lang") or language
        if chosen is not None and chosen not in ids:
            raise CheckpointError(f"src_lang={chosen!r} of {self.path} is not one of {', '.join(ids)}")
        return Languages(ids, all_ids(before), all_ids(after), chosen)

    def _id(self, backend: Backend, text: str) -> int:
        if (index := backend.token_to_id(text)) is None:
            raise CheckpointError(f"the vocabulary of {self.path} lacks the token {text!r}")
        return index

    def around(self, tokens: Mapping[str, AddedToken]) -> dict[str, Any]:
        """The bos token before a text and the eos token after it, where the options ask for them."""
        bos = [tokens["bos_token"].content] if self.options.get("add_bos_token") and "bos_token" in tokens else []
        eos = [tokens["eos_token"].content] if self.options.get("add_eos_token") and "eos_token" in tokens else []
        return {"before": bos, "after": eos}


def added_token(value: Any, special: bool = False) -> AddedToken:
    """A token as the files write it: its text, or an object with `content` and flags."""
    from tokenizers import AddedToken

    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special", special)), **flags)


def masked_left(names: Mapping[str, Any]) -> dict[str, Any]:
    """The same special tokens, with a mask that takes in the space before it."""
    from tokenizers import AddedToken

    mask = AddedToken(names["mask_token"], lstrip=True, special=True, normalized=False)
    return {**names, "mask_token": mask}


def read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
