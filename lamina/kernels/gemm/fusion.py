"""The fusion plan: which norms of a model are computed by the launch in front of them, or by those behind.

    deferred   product → norm          the product also writes weight · y and Σ y²; the product behind the norm divides
                                       its own sums (`deferred_norm.py`)
    twice      norm + residual → norm  one launch writes the sum and the second norm of it (`rms_norm_twice`)
    inline     layer norm → products   every program of these products computes the norm (`inline_norm.py`)

A plan is a list of module paths, made once per model (`fusion_trace.py`) and shown by `print(model.fusion_plan)`:

    blocks.0.attention.out → blocks.0.mlp_norm        deferred
    blocks.0.mlp.down      → blocks.1.attention_norm  deferred

`plan.bind(model)` gives the `Fusions` that modules consult inside a captured program. It belongs to the workspace of
that program, and so do the results that wait for their norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lamina.errors import LaminaError

if TYPE_CHECKING:
    from lamina.nn.norm import LayerNorm, RMSNorm


class Fusion(NamedTuple):
    """`norm` has no launch of its own where it reads what `first` returned."""

    first: str  # path of a product, or of a norm that adds a residual; "" if inline, after any module
    norm: str  # path of the norm that reads its result
    kind: Literal["deferred", "twice", "inline"]
    dtype: torch.dtype  # of the norm's result


@dataclass(frozen=True)
class FusionPlan:
    """All fusions of a model, in the order of a decode step.

    reason    why there are none, where the step could not be traced
    refused   whether that is a memory call that kernels refuse, so that no step can be captured
    """

    fusions: tuple[Fusion, ...] = ()
    reason: str | None = None
    refused: bool = False

    def bind(self, model: nn.Module) -> Fusions:
        """The plan for the modules that `model` has at these paths now; a fusion whose modules are gone is left out."""
        modules = dict(model.named_modules())
        bound: dict[nn.Module, NextNorm] = {}
        inline = {modules[one.norm] for one in self.fusions if one.kind == "inline" and one.norm in modules}
        for one in self.fusions:
            first, norm = modules.get(one.first), modules.get(one.norm)
            if first is not None and isinstance(getattr(norm, "weight", None), Tensor) and hasattr(norm, "plus_one"):
                bound[first] = NextNorm(norm, one.dtype)  # type: ignore[arg-type]
        return Fusions(bound, inline)

    def __str__(self) -> str:
        """
        >>> print(FusionPlan((Fusion("out", "norm", "deferred", torch.float32),)))
        out → norm  deferred
        >>> print(FusionPlan())
        no fused norms
        """
        if not self.fusions:
            return "no fused norms" + ("" if self.reason is None else f": {self.reason}")
        both = [(one.first, one.norm) if one.first else (one.norm, "products") for one in self.fusions]
        left, right = (max(map(len, ends)) for ends in zip(*both, strict=True))
        lines = zip(both, self.fusions, strict=True)
        return "\n".join(f"{first:{left}} → {second:{right}}  {one.kind}" for (first, second), one in lines)


class NextNorm(NamedTuple):
    """The norm that reads a module's result, and the dtype it returns."""

    norm: RMSNorm
    dtype: torch.dtype


class _Ready(NamedTuple):
    """A norm's result that exists before the norm is called.

    y         the tensor that the norm will be given; kept, so that no other tensor gets its id
    version   of y when it was written: an in-place operation since then makes the result stale
    """

    norm: RMSNorm
    y: Tensor
    version: int
    result: Tensor


class Fusions:
    """A plan bound to modules, and the results of the step under way that wait for their norm.

    A module that can compute the next norm asks `norm_after`, and hands the result to `made`. The norm asks `take`,
    which answers for the very tensor that the module returned and for no other: where a hook replaced it, or other
    code runs than in the step that was traced, the norm is launched.
    """

    def __init__(
        self, bound: Mapping[nn.Module, NextNorm] | None = None, inline: Collection[nn.Module] = frozenset()
    ) -> None:
        self._next, self._inline = dict(bound or {}), inline
        self._ready: list[_Ready] = []

    def begin(self) -> None:
        """A step begins: results that no norm took are dropped."""
        self._ready.clear()

    def norm_after(self, module: nn.Module) -> NextNorm | None:
        """The norm whose work this module does too, by the plan."""
        return self._next.get(module)

    def made(self, module: nn.Module, y: Tensor, normed: Tensor | None = None, **facts: Any) -> Tensor:
        """The module has computed y, and `normed`, the next norm of y, where it did that too; -> y

        facts   what decides whether a module is in the plan; read while tracing alone
        """
        if normed is not None:
            self._ready.append(_Ready(self._next[module].norm, y, version_of(y), normed))
        return y

    def take(self, norm: RMSNorm, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """norm(x) in this dtype, if the module that returned x has computed it; it may be `Unnormed`."""
        for i, one in enumerate(self._ready):
            if one.norm is norm and one.y is x and one.version == version_of(x) and one.result.dtype == dtype:
                return self._ready.pop(i).result
        return None

    def inlines(self, norm: LayerNorm, dtype: torch.dtype) -> Callable[[bool], None] | None:
        """None if this norm is a launch, by the plan. Otherwise a function to call where it must be launched after all,
        with whether its input is still as it was."""
        return _unplanned if norm in self._inline else None


def _unplanned(unchanged: bool) -> None:
    """A launch that is not in the plan: other code runs than in the step that was traced, such as a hook."""
    if not unchanged:
        raise LaminaError("the input of a layer norm was changed in place before the norm's result was read")


def version_of(x: Tensor) -> int:
    """How many in-place operations x has seen; inference tensors do not count them."""
    return 0 if x.is_inference() else x._version
