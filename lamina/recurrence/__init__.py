"""Recurrences: one file per rule (a readable step for one token, a form for many), and the short convolution."""

from lamina.recurrence.conv import causal_convolution, causal_convolution_by_steps
from lamina.recurrence.gated_delta import GatedDelta
from lamina.recurrence.rule import Rule
from lamina.recurrence.selective_scan import SelectiveScan
from lamina.recurrence.ssd import SSD

__all__ = ["SSD", "GatedDelta", "Rule", "SelectiveScan", "causal_convolution", "causal_convolution_by_steps"]
