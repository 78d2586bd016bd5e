"""The fusion plan of a model, `model.fusion_plan`: traced from one decode step in which nothing is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lamina import kernels
from lamina.kernels.gemm.fusion import FusionPlan
from lamina.runtime.captured import Captured
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.pointers import PLAINLY

if TYPE_CHECKING:
    from lamina.model import Model


def trace_model(model: Model, logits: Literal["last", "all"] = "last") -> FusionPlan:
    """Which norms a captured program of this model computes in the launch in front of them.

    logits   "last" for a decode step, "all" for a pass of several tokens: after a step the last norm reads a view of
             what the blocks made, after a pass the very tensor, which the last block's launch can then normalise
    """
    if not kernels.installed():
        return FusionPlan(reason="Triton is not installed")
    if reason := why_no_kernels(model.specs, dtype=model.dtype):
        return FusionPlan(reason=reason)
    from lamina.kernels.gemm.fusion_trace import trace  # imports Triton

    one = Captured(model, 1, 1, PLAINLY, counts=1)
    try:
        return trace(lambda: model.forward(one.ids, one, logits=logits), model, one.workspace)  # type: ignore[arg-type]
    except torch.OutOfMemoryError:
        raise  # there may be memory another time
    except Exception as problem:  # whoever captures the step meets it again, with its own trace
        return FusionPlan(reason=f"a step cannot be traced: {type(problem).__name__}: {problem}")
