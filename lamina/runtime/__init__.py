"""How passes are run fast: a decode step captured once and replayed, and words for when that is not done."""

from lamina.runtime.capture import CapturedStep, Graphs
from lamina.runtime.explain import why_not_captured

__all__ = ["CapturedStep", "Graphs", "why_not_captured"]
