"""The errors Lamina raises on purpose. Each text names the value, the limit and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.generation.result import Result


class LaminaError(Exception):
    """Base of every error raised on purpose."""


class InputError(LaminaError, ValueError):
    """What was given cannot be used: ids out of range, counts larger than the pass, a cache of another model …"""


class CapacityError(LaminaError, ValueError, IndexError):
    """A row would hold more tokens than there is room for. The pass that was to write them wrote nothing."""

    result: Result | None = None
    """Raised by `generate` after its first pass: what was made until then, and the cache that holds it."""


class PagesError(CapacityError):
    """A pool has fewer free pages than a pass needs. The pass changed nothing."""


class RewindError(LaminaError, ValueError):
    """A row cannot be taken back that far. Nothing was changed."""


class CacheFileError(LaminaError, ValueError):
    """A cache file was cut short or altered, or belongs to another model; or it cannot be written there."""


class ProgramError(LaminaError, ValueError):
    """An exported program was cut short or altered, or cannot be made of this model."""


class CheckpointError(LaminaError, ValueError):
    """A checkpoint cannot be read, or does not fit the model. The text names the files and tensors."""


class CaptureError(LaminaError, RuntimeError):
    """A captured program cannot be had: all are in use, or it could not be captured. Nothing was changed."""
