"""How many examples the laws may take: about 300 in all, or LAMINA_LAWS_EXAMPLES.

The usual run is the same every time; a run of another size looks at new examples each time.
"""

from __future__ import annotations

import os
from datetime import timedelta

from hypothesis import HealthCheck, settings

ASKED = os.environ.get("LAMINA_LAWS_EXAMPLES")


def examples(share: float, **more: object) -> settings:
    """Settings for a property that takes this share of all examples."""
    return settings(
        max_examples=max(1, round(share * int(ASKED or 300))),
        derandomize=ASKED is None,
        deadline=timedelta(seconds=60),
        suppress_health_check=list(HealthCheck),
        **more,  # type: ignore[arg-type]
    )
