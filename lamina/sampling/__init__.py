"""From logits to the next token: settings, processors that change scores, and the noise of the draws."""

from lamina.sampling.chain import Facts, chain_of
from lamina.sampling.chooser import Chooser
from lamina.sampling.filters import Filter, below_best
from lamina.sampling.history import History, Processor
from lamina.sampling.kinds import (
    Custom,
    Flag,
    Function,
    Functions,
    Number,
    OneOf,
    Texts,
    TokenId,
    TokenIds,
    ValueKind,
    Whole,
    Wrong,
)
from lamina.sampling.setting import Need, ProcessorContext, Setting, Stage

__all__ = [
    "Chooser", "Custom", "Facts", "Filter", "Flag", "Function", "Functions", "History", "Need", "Number", "OneOf",
    "Processor", "ProcessorContext", "Setting", "Stage", "Texts", "TokenId", "TokenIds", "ValueKind", "Whole", "Wrong",
    "below_best", "chain_of",
]  # fmt: skip
