r"""Constrained decoding: new text follows a JSON schema, a regular expression, a Lark grammar or a list of texts.

The library llguidance (`pip install lamina[grammar]`) compiles the grammar into a matcher, which lists the ids that may
follow a row's new tokens. `Grammar` keeps one matcher per row. Before each question the matcher is brought to the row's
present tokens: it rolls back tokens that are gone and consumes new ones. So the answer depends on the tokens alone, and
rows may be ragged, be rewound, be reordered, or end.

In regular expressions, and in those of a Lark grammar, `\d`, `\w` and `\s` (and `\D`, `\W`, `\S`) are ASCII:
`{"regex": r"\d{4}"}` gives digits from 0 to 9. `{"regex": r"\d{4}", "unicode": True}` allows the digits of every
script. The patterns of a JSON schema follow ECMA-262, where these classes are ASCII too, except white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.sampling.bans import check_id
from lamina.sampling.forcing import allow_only
from lamina.sampling.history import History
from lamina.sampling.kinds import Custom
from lamina.sampling.setting import ProcessorContext, Setting, Stage

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark", "choice")
ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r\x20"}  # \x20: a space would be lost in (?x)
ESCAPE = re.compile(r"\\(.)", re.S)
LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/((?:\\.|[^/\\\n])+)/')  # string, comment or regex (group 1)
_vocabularies: WeakKeyDictionary[Tokenizer, dict[Any, Any]] = WeakKeyDictionary()


@dataclass
class _Row:
    """A matcher and the tokens that it has consumed."""

    matcher: Any
    consumed: list[int] = field(default_factory=list)

    def move_to(self, tokens: list[int]) -> int:
        """Rolls back and consumes until `tokens` are consumed. -> how many of them the grammar allows"""
        old, same = self.consumed, len(self.consumed)
        if tokens[:same] != old:
            same = next((at for at, (a, b) in enumerate(zip(old, tokens, strict=False)) if a != b), len(tokens))
            self.matcher.rollback(len(old) - same)
        allowed = same + self.matcher.try_consume_tokens(tokens[same:])
        self.consumed = tokens[:allowed]
        return allowed


@dataclass(frozen=True)
class Grammar:
    """Bans ids that the grammar does not allow next; made by `grammar_of`. The matchers run on the host, so the device
    waits for them at every token. A row that has ended, or a beam that left the grammar, may only end."""

    text: str  # the grammar, compiled by llguidance
    vocabulary: Any  # llguidance's form of the tokenizer
    ends: frozenset[int]
    beams: int = 1
    needs_tokens: ClassVar[bool] = True
    excludes: ClassVar[str] = "all"
    setting: ClassVar[str] = "grammar"
    _rows: dict[int, _Row] = field(default_factory=dict, repr=False)

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        allowed = self.allowed(new_tokens(history), history.numbers(), scores.shape[-1])
        return allow_only(scores, allowed.to(scores.device), self.beams)

    def allowed(self, rows: Sequence[list[int]], numbers: Sequence[int], vocab: int) -> Tensor:
        """Which ids may follow the new tokens of each row. [B, V] bool, on the host"""
        allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
        for at, (number, tokens) in enumerate(zip(numbers, rows, strict=True)):
            bits = self._follow(number, tokens)
            if bits is None:
                allowed[at, list(self.ends)] = True
            else:
                words = torch.frombuffer(bytearray(bits), dtype=torch.int32)  # one bit per id
                allowed[at] = (words[:, None] >> torch.arange(32) & 1).bool().flatten()[:vocab]
        return allowed

    def _follow(self, number: int, tokens: list[int]) -> bytes | None:
        """The bitmask of ids that may follow these tokens; None if the row may only end."""
        if not self.ends.isdisjoint(tokens):
            return None
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = _Row(_llguidance().LLMatcher(self.vocabulary, self.text, log_level=0))
        followed = row.move_to(tokens)
        if followed < len(tokens):
            if self.beams > 1:
                return None  # a beam of probability 0, kept because fewer continuations than beams are allowed
            raise InputError(
                f"row {number}: new token number {followed} is the id {tokens[followed]}, which the grammar does not "
                "allow: another processor or a forced token left no allowed id"
            )
        bits: bytes = row.matcher.compute_bitmask()
        if row.matcher.is_error():
            raise InputError(f"row {number}: llguidance cannot follow the grammar further: {row.matcher.get_error()}")
        return bits


def new_tokens(history: History) -> list[list[int]]:
    """The new tokens of each row, on the host."""
    prompts, lengths = torch.stack([history.prompts, history.lengths]).tolist()
    first = min(prompts, default=0)  # every row has at least this many prompt tokens: they are not copied to the host
    rows = history.ids[:, first:].tolist()
    return [row[prompt - first : length - first] for row, prompt, length in zip(rows, prompts, lengths, strict=True)]


def grammar_of(given: Any, tokenizer: Tokenizer | None, ends: Sequence[int], vocab: int, beams: int = 1) -> Grammar:
    r"""The processor for {"json": schema}, {"regex": text}, {"lark": text} or {"choice": [text, …]}; a schema is a
    mapping or its JSON text. "unicode": True beside regex or lark makes classes such as \d match characters of every
    script. `ends` are the ids that end a row: they are allowed where the grammar is satisfied."""
    kind, value, unicode = _read(given)
    if tokenizer is None:
        raise InputError("a grammar needs the text of every token, and this checkpoint has no tokenizer")
    if not ends:
        raise InputError("a grammar needs eos_token_id: without one a row cannot end where the grammar ends")
    for id in ends:
        check_id(id, vocab, "eos_token_id")
    if kind == "choice" and (isinstance(value, str) or not value):
        raise InputError(f"choice must be a list of texts, not {value!r}")
    matcher = _llguidance().LLMatcher
    try:
        if kind == "json":
            text = matcher.grammar_from_json_schema(value if isinstance(value, str) else json.dumps(value))
        elif kind == "regex":
            text = matcher.grammar_from_regex(value if unicode else ascii_classes(value))
        else:
            lark = value if kind == "lark" else "start: " + " | ".join(json.dumps(str(one)) for one in value)
            text = matcher.grammar_from_lark(lark if unicode or kind == "choice" else ascii_in_lark(lark))
    except (TypeError, ValueError) as error:
        raise InputError(f"the {kind} grammar {value!r} cannot be read: {error}") from error
    vocabulary = vocabulary_of(tokenizer, tuple(ends), vocab)
    wrong, messages = matcher.validate_grammar_with_warnings(text, vocabulary)
    if wrong:
        raise InputError(f"the {kind} grammar {value!r} cannot be used: {messages[0]}")
    return Grammar(text, vocabulary, frozenset(ends), beams)


def _read(given: Any) -> tuple[str, Any, bool]:
    """(kind, its value, unicode) of the setting `grammar`."""
    rest = {name: value for name, value in given.items() if name != "unicode"} if isinstance(given, Mapping) else {}
    if len(rest) != 1 or next(iter(rest)) not in KINDS:
        raise InputError(f"grammar must be a mapping with one of {', '.join(KINDS)}, not {given!r}")
    ((kind, value),) = rest.items()
    unicode = given.get("unicode", False)
    if not isinstance(unicode, bool):
        raise InputError(f"grammar has unicode={unicode!r}: it must be True or False")
    if "unicode" in given and kind not in ("regex", "lark"):
        raise InputError(f"grammar has unicode={unicode} beside {kind}: it is for regex and lark only, leave it out")
    return kind, value, unicode


def ascii_classes(regex: str) -> str:
    r"""The regular expression with \d, \w, \s, \D, \W and \S replaced by their ASCII characters.

    >>> print(ascii_classes(r"\d+[\s.]\\d\D"))
    [0-9]+[[\t\n\v\f\r\x20].]\\d[^0-9]
    """

    def ascii_class(found: re.Match[str]) -> str:
        letter = found[1]
        if letter.lower() not in ASCII:
            return found[0]
        return f"[{'^' if letter.isupper() else ''}{ASCII[letter.lower()]}]"  # [ ] may be nested

    return ESCAPE.sub(ascii_class, regex)


def ascii_in_lark(lark: str) -> str:
    r"""`ascii_classes` for every regular expression of a Lark grammar.

    >>> print(ascii_in_lark('start: "\\d" /\d/  // \d'))
    start: "\d" /[0-9]/  // \d
    """
    return LARK.sub(lambda found: f"/{ascii_classes(found[1])}/" if found[1] else found[0], lark)


def vocabulary_of(tokenizer: Tokenizer, ends: tuple[int, ...], vocab: int) -> Any:
    """llguidance's form of a tokenizer, cached. A model may have more ids than its tokenizer."""
    made = _vocabularies.setdefault(tokenizer, {})
    if (ends, vocab) not in made:
        size = max(vocab, tokenizer.vocab_size)
        text = tokenizer.backend.to_str()
        try:
            made[ends, vocab] = _llguidance().LLTokenizer(text, n_vocab=size, eos_token=list(ends))
        except ValueError as error:
            raise InputError(
                f"a grammar needs a tokenizer that llguidance reads, byte-level or with byte fallback ({error}): use "
                "prefix_allowed_tokens_fn with this one"
            ) from error
    return made[ends, vocab]


def _llguidance() -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise InputError("grammars need the library llguidance: pip install lamina[grammar]") from error


def _grammar(given: Any, context: ProcessorContext) -> Grammar:
    return grammar_of(given, context.facts.tokenizer, context.end_ids, context.vocab, context.beams)


SETTINGS = (
    Setting(
        "grammar", Custom("Any", "Mapping[str, Any]"), default=None, stage=Stage.ALLOW, processor=_grammar,
        needs_tokenizer=True,
        meaning='New text follows {"json": schema}, {"regex": text}, {"lark": text} or {"choice": [text, …]}.',
    ),
)  # fmt: skip
