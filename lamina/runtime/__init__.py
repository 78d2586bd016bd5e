"""Fast passes: decode steps and short passes captured in CUDA graphs, compiled blocks, and the reasons where neither
applies."""

from lamina.runtime import prefill as prefill  # offers its backends to `lamina.attention`
from lamina.runtime.eligibility import why_no_passes, why_not_captured
from lamina.runtime.graphs import Graphs
from lamina.runtime.multi_token import CapturedPass
from lamina.runtime.step import CapturedStep

__all__ = ["CapturedPass", "CapturedStep", "Graphs", "why_no_passes", "why_not_captured"]
