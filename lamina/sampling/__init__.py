"""From logits to the next token: settings, processors that change scores, and the noise of the draws."""

from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from lamina.sampling.filters import Filter, below_best
from lamina.sampling.history import History, Processor
from lamina.sampling.kinds import (
    Choice,
    Flag,
    Function,
    Functions,
    Kind,
    Number,
    Texts,
    TokenId,
    TokenIds,
    Value,
    Whole,
    Wrong,
)
from lamina.sampling.setting import Context, Need, Setting, Stage

__all__ = [
    "Choice", "Chooser", "Context", "Facts", "Filter", "Flag", "Function", "Functions", "History", "Kind", "Need",
    "Number", "Processor", "Setting", "Stage", "Texts", "TokenId", "TokenIds", "Value", "Whole", "Wrong", "below_best",
    "chain_of",
]  # fmt: skip
