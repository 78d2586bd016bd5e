"""Proving, on the user's own model, that the cache changes nothing."""

from lamina.checking.report import Report
from lamina.checking.verify import check_numbers, verify

__all__ = ["Report", "check_numbers", "verify"]
