"""How a fusion plan is made: one decode step runs with every launch left out, and shows which norm reads which result.

Modules run their kernel code, so the step is the one that is captured, but a launch returns at once (`launch.dry`).
Tensors that kernels would have written are zero, so that PyTorch operations between them see valid values and indices.
On the meta device there is nothing to fill in, so a step without PyTorch arithmetic has none here either.

A norm is fused with the module whose result it is given, as the same tensor, unchanged since. It stays out of the plan

    where the product reads more than MOST_BYTES: while the norm waits for such a product, the weights of the next are
    already being loaded, so its launch costs nothing;
    where something else than a product of `lamina.nn` reads the norm's result: it would have to divide by itself.

Where several norms read one result, the first is fused.

A layer norm is inline if products that can compute it (`inline_norm.py`) are all that reads its result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lamina import kernels
from lamina.kernels.gemm.deferred_norm import LANES, Unnormed
from lamina.kernels.gemm.fusion import Fusion, FusionPlan, Fusions, NextNorm, version_of
from lamina.kernels.launch import Launched, dry
from lamina.kernels.limits import CARDS, assumed

if TYPE_CHECKING:
    from lamina.kernels.workspace import Workspace
    from lamina.nn.norm import LayerNorm, RMSNorm

EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
MOST_BYTES = 30_000_000  # of a weight in front of a norm that is worth fusing


def trace(
    run: Callable[[], object], root: nn.Module, workspace: Workspace, launched: list[Launched] | None = None
) -> FusionPlan:
    """The plan for the modules of `root` by one run of `run`, with the kernels of this workspace and none launched.

    launched   gets every launch that was left out
    """
    workspace.fusions = tracer = Tracer(root)
    with (
        kernels.in_use(workspace),
        dry(launched),
        assumed(CARDS[90]),
        torch.inference_mode(False),
        torch.no_grad(),
        _Zeros(),
    ):
        run()
    return FusionPlan(tuple(tracer.found.values()))


class _Made(NamedTuple):
    """A result that a norm might read."""

    module: nn.Module
    y: Tensor
    version: int
    facts: dict[str, Any]


class Tracer(Fusions):
    """Stands in for a bound plan and notes what a run does; `found` has the fusion of each first module."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.paths = {module: path for path, module in root.named_modules()}
        self.found: dict[nn.Module, Fusion] = {}
        self._made: list[_Made] = []
        self._launched: set[nn.Module] = set()  # layer norms that something else reads

    def norm_after(self, module: nn.Module) -> NextNorm | None:
        return None

    def made(self, module: nn.Module, y: Tensor, normed: Tensor | None = None, **facts: Any) -> Tensor:
        """facts: `nbytes`, the bytes of weights that a product reads, or `plus_one` of a norm that adds a residual"""
        if module in self.paths:
            self._made.append(_Made(module, y, version_of(y), facts))
        return y

    def take(self, norm: RMSNorm, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        made = next((one for one in self._made if one.y is x and one.version == version_of(x)), None)
        if made is None or norm.weight is None or norm not in self.paths:
            return None
        twice = "plus_one" in made.facts
        fits = dtype == x.dtype and norm.plus_one == made.facts["plus_one"] if twice else _is_small(made, x)
        fusion = Fusion(self.paths[made.module], self.paths[norm], "twice" if twice else "deferred", dtype)
        if not fits or self.found.setdefault(made.module, fusion) != fusion:
            return None
        return None if twice else _Watched(self, made.module, x.new_empty(x.shape, dtype=dtype), norm.eps)

    def inlines(self, norm: LayerNorm, dtype: torch.dtype) -> Callable[[bool], None] | None:
        if norm not in self.paths or norm in self._launched:
            return None
        self.found[norm] = Fusion("", self.paths[norm], "inline", dtype)
        return partial(self._refuse, norm)

    def _refuse(self, norm: LayerNorm, unchanged: bool) -> None:
        self._launched.add(norm)
        self.found.pop(norm, None)


def _is_small(made: _Made, x: Tensor) -> bool:
    """True if the product is of one vector and reads few bytes."""
    return x.numel() == x.shape[-1] and made.facts["nbytes"] <= MOST_BYTES


class _Watched(Unnormed):
    """What a deferred norm returns during a trace. A caller that needs it divided removes the fusion from the plan."""

    @staticmethod
    def __new__(cls, tracer: Tracer, product: nn.Module, x: Tensor, eps: float) -> _Watched:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, tracer: Tracer, product: nn.Module, x: Tensor, eps: float) -> None:
        super().__init__(x, x.new_empty(LANES.value * 4, dtype=torch.int64), eps)
        self.tracer, self.product = tracer, product

    def divided(self) -> Tensor:
        self.tracer.found.pop(self.product, None)
        return self.x


class _Zeros(TorchFunctionMode):
    """New tensors are zero, which stands for what a kernel would have written. (A dispatch mode, which would see more,
    loads PyTorch's compiler, which takes seconds.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func in EMPTY and not out.is_meta else out
