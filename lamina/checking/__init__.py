"""Proving, on the user's own model, that the cache changes nothing."""

from lamina.checking.report import Report
from lamina.checking.verify import verify

__all__ = ["Report", "verify"]
