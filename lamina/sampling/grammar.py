r"""Rows that follow a grammar: a JSON schema, a regular expression, a Lark grammar, or one of several texts.

The library llguidance (`pip install lamina[grammar]`) compiles the grammar and says, for the new tokens of a row, which
ids may come next. `Grammar` keeps one of its matchers for each row, and brings it to the tokens that the row holds
now: it takes back what is not there any more and takes in what is new. So the answer depends on the tokens alone, and
rows may be ragged, be rewound, change places, or end.

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
from lamina.sampling.bans import inside
from lamina.sampling.forcing import only
from lamina.sampling.history import History

if TYPE_CHECKING:
    from lamina.checkpoint.tokenizer import Tokenizer

KINDS = ("json", "regex", "lark", "choice")
ASCII = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r\x20"}  # \x20: a space would be lost in (?x)
ESCAPE = re.compile(r"\\(.)", re.S)
LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/((?:\\.|[^/\\\n])+)/')  # a text, a comment, an expression
_vocabularies: WeakKeyDictionary[Tokenizer, dict[Any, Any]] = WeakKeyDictionary()


@dataclass
class _Row:
    """A matcher and the tokens that it has taken in."""

    matcher: Any
    taken: list[int] = field(default_factory=list)

    def bring_to(self, tokens: list[int]) -> int:
        """Makes `tokens` the ones taken in; how many of them the grammar allows."""
        same = len(self.taken)
        if tokens[:same] != self.taken:
            same = next((at for at, (a, b) in enumerate(zip(self.taken, tokens, strict=False)) if a != b), len(tokens))
            self.matcher.rollback(len(self.taken) - same)
        taken = same + self.matcher.try_consume_tokens(tokens[same:])
        self.taken = tokens[:taken]
        return taken


@dataclass(frozen=True)
class Grammar:
    """The processor; made by `grammar_of`. The host asks the matchers, so the device waits for it at every token. A row
    that has ended, or a beam that left the grammar, may only end."""

    text: str  # as llguidance compiled it
    vocabulary: Any  # its tokenizer
    ends: frozenset[int]
    beams: int = 1
    needs_tokens: ClassVar[bool] = True
    _rows: dict[int, _Row] = field(default_factory=dict, repr=False)

    def __call__(self, scores: Tensor, history: History) -> Tensor:
        allowed = self.allowed(new_tokens(history), history.numbers(), scores.shape[-1])
        return only(scores, allowed.to(scores.device), self.beams)

    def allowed(self, rows: Sequence[list[int]], numbers: Sequence[int], vocab: int) -> Tensor:
        """Which ids may follow the new tokens of each row. [B, V] bool, on the host"""
        allowed = torch.zeros(len(rows), vocab, dtype=torch.bool)
        for at, (number, tokens) in enumerate(zip(numbers, rows, strict=True)):
            bits = self._follow(number, tokens)
            if bits is None:
                allowed[at, list(self.ends)] = True
            else:
                words = torch.frombuffer(bytearray(bits), dtype=torch.int32)  # a bit for each id
                allowed[at] = (words[:, None] >> torch.arange(32) & 1).bool().flatten()[:vocab]
        return allowed

    def _follow(self, number: int, tokens: list[int]) -> bytes | None:
        """What llguidance allows after these tokens; None where the row may only end."""
        if not self.ends.isdisjoint(tokens):
            return None
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = _Row(_llguidance().LLMatcher(self.vocabulary, self.text, log_level=0))
        taken = row.bring_to(tokens)
        if taken < len(tokens):
            if self.beams > 1:
                return None  # a beam of probability 0, kept where there are fewer ways on than beams
            raise InputError(
                f"row {number} has the new token {tokens[taken]} at place {taken}, which the grammar does not allow: "
                "another processor, or a forced token, let nothing else through"
            )
        bits: bytes = row.matcher.compute_bitmask()
        if row.matcher.is_error():
            raise InputError(f"the grammar cannot be followed further in row {number}: {row.matcher.get_error()}")
        return bits


def new_tokens(history: History) -> list[list[int]]:
    """The new tokens of each row, on the host."""
    prompts, lengths = torch.stack([history.prompts, history.lengths]).tolist()
    first = min(prompts, default=0)  # so many tokens are prompt in every row: they are not copied
    rows = history.ids[:, first:].tolist()
    return [row[prompt - first : length - first] for row, prompt, length in zip(rows, prompts, lengths, strict=True)]


def grammar_of(given: Any, tokenizer: Tokenizer | None, ends: Sequence[int], vocab: int, beams: int = 1) -> Grammar:
    r"""From one of {"json": schema}, {"regex": text}, {"lark": text}, {"choice": [text, …]}; a schema may be a mapping
    or its JSON text. With "unicode": True beside them, classes such as \d hold the characters of every script. `ends`
    are the ids that end a row: the grammar allows them where it is satisfied."""
    kind, value, unicode = _read(given)
    if tokenizer is None:
        raise InputError("a grammar needs the text of every token, and this checkpoint has no tokenizer")
    if not ends:
        raise InputError("a grammar needs eos_token_id: without it a row could not end where the grammar does")
    for id in ends:
        inside(id, vocab, "eos_token_id")
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
    """The kind of a grammar, what was given for it, and whether its classes are those of Unicode."""
    rest = {name: value for name, value in given.items() if name != "unicode"} if isinstance(given, Mapping) else {}
    if len(rest) != 1 or next(iter(rest)) not in KINDS:
        raise InputError(f"grammar must be a mapping with one of {', '.join(KINDS)}, not {given!r}")
    ((kind, value),) = rest.items()
    unicode = given.get("unicode", False)
    if not isinstance(unicode, bool):
        raise InputError(f"grammar has unicode={unicode!r}: it must be True or False")
    if "unicode" in given and kind not in ("regex", "lark"):
        raise InputError(f"grammar has unicode={unicode}, which is for regex and lark: leave it out beside {kind}")
    return kind, value, unicode


def ascii_classes(regex: str) -> str:
    r"""The expression with \d, \w, \s and their opposites written out in ASCII.

    >>> print(ascii_classes(r"\d+[\s.]\\d\D"))
    [0-9]+[[\t\n\v\f\r\x20].]\\d[^0-9]
    """

    def written(found: re.Match[str]) -> str:
        letter = found[1]
        if letter.lower() not in ASCII:
            return found[0]
        return f"[{'^' if letter.isupper() else ''}{ASCII[letter.lower()]}]"  # also right inside another [ ]

    return ESCAPE.sub(written, regex)


def ascii_in_lark(lark: str) -> str:
    r"""The same in every regular expression of a Lark grammar.

    >>> print(ascii_in_lark('start: "\\d" /\d/  // \d'))
    start: "\d" /[0-9]/  // \d
    """
    return LARK.sub(lambda found: f"/{ascii_classes(found[1])}/" if found[1] else found[0], lark)


def vocabulary_of(tokenizer: Tokenizer, ends: tuple[int, ...], vocab: int) -> Any:
    """llguidance's form of a tokenizer, made once; a model may have more ids than its tokenizer."""
    made = _vocabularies.setdefault(tokenizer, {})
    if (ends, vocab) not in made:
        size = max(vocab, tokenizer.vocab_size)
        made[ends, vocab] = _llguidance().LLTokenizer(tokenizer.backend.to_str(), n_vocab=size, eos_token=list(ends))
    return made[ends, vocab]


def _llguidance() -> Any:
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise InputError("grammars need the library llguidance: pip install lamina[grammar]") from error
