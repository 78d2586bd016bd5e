"""How passes are run fast: steps and short passes captured once and replayed, and words for when they are not."""

from lamina.runtime.eligibility import why_no_passes, why_not_captured
from lamina.runtime.graphs import Graphs
from lamina.runtime.multi_token import CapturedPass
from lamina.runtime.step import CapturedStep

__all__ = ["CapturedPass", "CapturedStep", "Graphs", "why_no_passes", "why_not_captured"]
