"""Which kernels the captured step of a model launches, up to sizes: families with equal signatures run the same code.

A step of a small model runs on the meta device with every launch left out (`lamina.kernels.launch.dry`). A launch
counts by its kernel; one that reads or writes a cache also by its constexprs that are no numbers. Other kernels compute
the same over any cache, so a few checks of each family cover their options.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from lamina.kernels.gemm.fusion_trace import trace
from lamina.kernels.launch import Launched
from lamina.loading import on_meta
from lamina.model import Model
from lamina.planning.layer_kinds import kind_name
from lamina.runtime.captured import Captured
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.pointers import PLAIN_FORMAT


def signature(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Hashable:
    """Equal for configurations whose steps launch the same kernels; None if steps are not captured."""
    return signature_of(on_meta(config, dtype))


@torch.no_grad()
def signature_of(model: Model) -> Hashable:
    if why_no_kernels(model.specs, dtype=model.dtype) is not None:
        return None
    launched: list[Launched] = []
    one = Captured(model, 1, 1, PLAIN_FORMAT, counts=1)
    try:
        plan = trace(lambda: model.forward(one.ids, one, logits="last"), model, one.workspace, launched)
    except Exception:  # a call that no kernel serves: `lamina inspect` names it
        return None
    kinds = frozenset(kind_name(spec) for entry in model.specs for spec in entry.values())
    return kinds, frozenset(fusion.kind for fusion in plan.fusions), frozenset(_form(each) for each in launched)


def _form(launch: Launched) -> Hashable:
    remembers = ".attention." in launch.module or ".recurrent." in launch.module
    flags = ((name, x) for name, x in sorted(launch.options.items()) if isinstance(x, bool | str | None))
    return launch.kernel, tuple(flags) if remembers else ()
