"""`SpeechIds`: the special ids of a speech model, and the ids with which its decoder begins.

A decoder's row begins with <|startoftranscript|>, then for multilingual models the language and the task, then
<|notimestamps|> unless timestamps are wanted. Earlier text stands before all of that, after <|startofprev|>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lamina.audio.languages import CODES
from lamina.config import config_of
from lamina.errors import InputError

if TYPE_CHECKING:
    from lamina.model import Model

TASKS = ("transcribe", "translate")
MULTILINGUAL = 51865  # vocabulary size from which published models are multilingual
OUTDATED = "neither generation_config.json nor the tokenizer of this checkpoint says its id of {what}"


@dataclass(frozen=True)
class SpeechIds:
    """Ids that a checkpoint does not name are None."""

    start: int
    end: int
    no_timestamps: int | None
    previous: int | None
    languages: Mapping[str, int]
    """code -> id; empty for a model of one language"""
    tasks: Mapping[str, int]
    latest_first: int | None
    """The largest first timestamp, in steps of 0.02 s; None: any."""
    language: str | None = None
    """What the checkpoint itself says where the caller says nothing."""
    task: str | None = None

    @classmethod
    def of(cls, model: Model) -> SpeechIds:
        """From generation_config.json; what it does not say, from the tokenizer."""
        says, tokens = model.generation_defaults, _tokens(model)
        languages = says.get("lang_to_id") or {
            text: id for text, id in tokens.items() if re.fullmatch(r"<\|[a-z]{2,3}\|>", text)
        }
        multilingual = says.get("is_multilingual", "lang_to_id" in says or model.vocab >= MULTILINGUAL)
        tasks = says.get("task_to_id") or {task: tokens[f"<|{task}|>"] for task in TASKS if f"<|{task}|>" in tokens}
        codes = {token.strip("<|>"): id for token, id in languages.items()} if multilingual else {}
        forced_ids = says.get("forced_decoder_ids") or config_of(model).get("forced_decoder_ids") or ()  # older form
        forced = [id for _, id in forced_ids if id is not None]
        return cls(
            start=says.get("decoder_start_token_id", model.start_ids[0]),
            end=(model.eos_ids or (None,))[0],  # type: ignore[arg-type]
            no_timestamps=says.get("no_timestamps_token_id", tokens.get("<|notimestamps|>")),
            previous=says.get("prev_sot_token_id", tokens.get("<|startofprev|>")),
            languages=codes,
            tasks=tasks if multilingual else {},
            latest_first=says.get("max_initial_timestamp_index"),
            language=says.get("language") or next((code for code, id in codes.items() if id in forced), None),
            task=says.get("task") or next((task for task, id in tasks.items() if id in forced), None),
        )

    @property
    def first_timestamp(self) -> int:
        """Id of the timestamp 0.00."""
        return self.known("no_timestamps", "<|notimestamps|>") + 1

    @property
    def no_speech(self) -> int:
        """Id of <|nospeech|>, which stands before <|notimestamps|>."""
        return self.known("no_timestamps", "<|notimestamps|>") - 1

    def known(self, name: str, what: str) -> int:
        """An id that is needed."""
        if (id := getattr(self, name)) is None:
            raise InputError(OUTDATED.format(what=what))
        return id

    def code(self, language: Any) -> str:
        """The code of a language, which is given by its code, its name, or its token.

        >>> ids = SpeechIds(1, 2, 9, None, {"en": 3, "de": 4}, {}, None)
        >>> ids.code("German"), ids.code("<|en|>")
        ('de', 'en')
        """
        if not self.languages:
            raise InputError(f"language={language!r}: this model knows one language only; leave language and task out")
        if not isinstance(language, str):
            raise InputError(f"language={language!r}: it must be a name or a code, such as 'english' or 'en'")
        name = language.lower().strip("<|>")
        code = name if name in self.languages else CODES.get(name)
        if code is None or code not in self.languages:
            raise InputError(f"language={language!r} is not known to this model; known: {', '.join(self.languages)}")
        return code

    def begin(self, code: str | None, task: str | None, timestamps: bool) -> list[int]:
        """The ids that a decoder's row begins with."""
        ids = [self.start]
        if self.languages:
            assert code is not None
            ids += [self.languages[code]]
            if self.tasks:
                ids += [self.tasks[task or self.task or TASKS[0]]]
        if not timestamps and self.no_timestamps is not None:
            ids += [self.no_timestamps]
        return ids

    def check_task(self, task: Any) -> None:
        if task is None:
            return
        if task not in TASKS:
            raise InputError(f"task={task!r}: it must be one of {', '.join(map(repr, TASKS))}")
        if task not in self.tasks:
            raise InputError(f"task={task!r}: this model knows one task only; leave language and task out")


def _tokens(model: Model) -> dict[str, int]:
    """The added tokens of the model's tokenizer, as text -> id."""
    if model.tokenizer is None:
        return {}
    return {token.content: id for id, token in model.tokenizer.backend.get_added_tokens_decoder().items()}
