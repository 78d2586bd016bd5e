"""The errors Lamina raises on purpose. Each text names the value, the limit and the way out."""

from __future__ import annotations


class LaminaError(Exception):
    """Base of every error raised on purpose."""


class InputError(LaminaError, ValueError):
    """What was given cannot be used: ids out of range, counts larger than the pass, a cache of another model …"""


class CapacityError(LaminaError, ValueError):
    """A row would hold more tokens than there is room for. Nothing was written."""


class PagesError(CapacityError):
    """A pool has fewer free pages than are needed. Nothing was changed."""


class RewindError(LaminaError, ValueError):
    """A row cannot be taken back that far. Nothing was changed."""


class CacheFileError(LaminaError, ValueError):
    """A cache file was cut short or altered, or belongs to another model; or it cannot be written there."""


class CaptureError(LaminaError, RuntimeError):
    """A captured program cannot be had: all are in use, or it could not be captured. Nothing was changed."""
