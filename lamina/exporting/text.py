"""The tokenizer in an exported program: its tokenizer.json, and the few facts beside it that the manifest holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamina.checkpoint.tokenizer import Tokenizer


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What tokenizer.json does not say, for `tokenizer_of`."""
    return {
        "eos_ids": list(tokenizer.eos_ids),
        "bos_id": tokenizer.bos_id,
        "add_bos": tokenizer.adds_bos,
        "templates": dict(tokenizer.templates),
        "special_tokens": dict(tokenizer.special_tokens),
    }


def tokenizer_of(text: bytes, facts: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of tokenizer.json and these facts."""
    from tokenizers import Tokenizer as Backend

    return Tokenizer(Backend.from_str(text.decode()), **facts)
