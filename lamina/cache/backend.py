"""`Backend`: how the memory calls of a pass are computed.

A pass carries one backend. `PlainBackend` (plain_backend.py) runs PyTorch operations over a cache's layers;
`KernelBackend` (runtime/gpu/backend.py) launches Triton kernels that find a cache through tables of addresses. There
is one method per memory call, with the arguments of that call (see memory.py).

Each method is given the pass, the key of the entry (index of the model's layer, name), and the entry itself: a `Layer`
for the plain backend, a row of the table for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, Unpack

from torch import Tensor

from lamina.cache.layers.base import Key

if TYPE_CHECKING:
    from lamina.attention.rotary import RopeTable
    from lamina.nn.norm import RMSNorm
    from lamina.nn.recurrent.gated_norm import GatedRMSNorm
    from lamina.nn.recurrent.short_conv import ShortConvolution


class Entry(Protocol):
    """What a backend works on: something with a spec."""

    @property
    def spec(self) -> Any: ...


class AttendOptions(TypedDict):
    """The arguments of `Memory.attend` besides q, k and v, all of them."""

    scale: float
    rope: RopeTable | None
    neighbours: bool
    norms: tuple[RMSNorm, RMSNorm] | None
    norms_last: bool
    factor: Tensor | None
    gate: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    bias: Callable[..., Tensor] | None


P = TypeVar("P", contravariant=True)
E = TypeVar("E", contravariant=True)


class Backend(Protocol[P, E]):
    """Computes memory calls in passes of type P over entries of type E."""

    def attend(
        self, one: P, key: Key, entry: E, q: Tensor, k: Tensor | None, v: Tensor | None, **how: Unpack[AttendOptions]
    ) -> Tensor: ...

    def attend_latent(
        self, one: P, key: Key, entry: E, q: Tensor, kv: Tensor,
        *, norm: RMSNorm, rope: RopeTable, neighbours: bool, up: Tensor, scale: float, restrict: Any = None,
    ) -> Tensor: ...  # fmt: skip

    def convolve(
        self, one: P, key: Key, entry: E, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, act: str | None, gates: tuple[Tensor, Tensor] | None,
    ) -> Tensor: ...  # fmt: skip

    def convolve_product(
        self, one: P, key: Key, entry: E, x: Tensor, conv: ShortConvolution, product: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """A convolution and the product of its result; None where it is to be composed of `convolve` and `product`."""
        ...

    def recur(
        self, one: P, key: Key, entry: E, inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor],
        around: Mapping[str, Any],
    ) -> Tensor: ...  # fmt: skip

    def mix(
        self, one: P, key: Key, entry: E, ring: E, x: Tensor, inputs: Mapping[str, Tensor],
        constants: Mapping[str, Tensor], *, conv: ShortConvolution, gate: Tensor, norm: GatedRMSNorm | None,
        around: Mapping[str, Any],
    ) -> Tensor | None:  # fmt: skip
        """A whole recurrent mixer; None where it is to be composed of `convolve`, `recur` and the norm.

        entry   of the recurrent state
        ring    of the convolution in front of it
        """
        ...

    def recall(self, one: P, key: Key, entry: E, x: Tensor) -> tuple[Tensor, Tensor]: ...

    def select(
        self, one: P, key: Key, entry: E, q: Tensor | None, k: Tensor | None, weights: Tensor | None,
        *, rope: RopeTable | None, neighbours: bool,
    ) -> Any:  # fmt: skip
        """The tokens that an indexer selects, as the `attend_latent` of this backend takes them."""
        ...

    def call(self, one: P, key: Key, entry: E, name: str, *args: Any, **how: Any) -> Any:
        """A memory call of a kind that is defined outside this package."""
        ...
