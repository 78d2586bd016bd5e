"""The fusion plan of a model, `model.fusion_plan`: traced from one decode step of one row, which launches nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lamina import kernels
from lamina.errors import InputError
from lamina.kernels.gemm.fusion import FusionPlan
from lamina.runtime.captured import Captured
from lamina.runtime.eligibility import why_no_kernels
from lamina.runtime.pointers import PLAIN_FORMAT

if TYPE_CHECKING:
    from lamina.model import Model


def trace_model(model: Model, logits: Literal["last", "all"] = "last") -> FusionPlan:
    """Finds which norms a captured program of this model computes in the launch before them.

    logits   "last" for a decode step, "all" for a pass of several tokens. With "last" the final norm reads a view of
             the last block's output; with "all" it reads that tensor itself, so the last block's launch can compute it
    """
    if not kernels.installed():
        return FusionPlan(reason="Triton is not installed")
    if reason := why_no_kernels(model.specs, dtype=model.dtype):
        return FusionPlan(reason=reason)
    from lamina.kernels.gemm.fusion_trace import trace  # imports Triton

    one = Captured(model, 1, 1, PLAIN_FORMAT, counts=1)
    try:
        return trace(lambda: model.forward(one.ids, one, logits=logits), model, one.workspace)
    except torch.OutOfMemoryError:
        raise  # a later trace may find enough memory
    except Exception as problem:  # not raised here: capturing the step raises it again, with a better traceback
        reason = f"a step cannot be traced: {type(problem).__name__}: {problem}"
        return FusionPlan(reason=reason, refused=isinstance(problem, InputError))
