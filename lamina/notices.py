"""Things a user should hear once: `notice` says each sentence at most once in a process, as a warning of a logger."""

from __future__ import annotations

import logging
from functools import cache

log = logging.getLogger("lamina")


@cache
def notice(text: str) -> None:
    """
    >>> notice("decoding by plain passes, since the model is on cpu")      # doctest: +SKIP
    lamina: decoding by plain passes, since the model is on cpu
    """
    log.warning("lamina: %s", text)
