"""Recurrences: one file per rule (a readable step for one token, a form for many), and the short convolution."""

from lamina.recurrence.channel_delta import ChannelDelta
from lamina.recurrence.conv import causal_convolution, causal_convolution_by_steps
from lamina.recurrence.gated_delta import GatedDelta
from lamina.recurrence.rg_lru import RGLRU
from lamina.recurrence.rule import Rule
from lamina.recurrence.selective_scan import SelectiveScan
from lamina.recurrence.ssd import SSD
from lamina.recurrence.wkv import WKV

__all__ = [
    "RGLRU",
    "SSD",
    "WKV",
    "ChannelDelta",
    "GatedDelta",
    "Rule",
    "SelectiveScan",
    "causal_convolution",
    "causal_convolution_by_steps",
]
