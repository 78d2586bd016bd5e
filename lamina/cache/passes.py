"""`Pass`: one forward pass, as `model.forward` sees it, whatever runs it.

    Step            step.py                  over a cache, or without one (`Step.alone`), by PyTorch operations
    PackedStep      packed.py                the same, ragged rows side by side without padding
    BlockStep       runtime/compile.py       a Step as one compiled block sees it
    CapturedStep    runtime/step.py          one token per row by kernels in a CUDA graph, which commits by itself
    CapturedPass    runtime/multi_token.py   several tokens per row by kernels; the caller commits
    CapturedPrompt  runtime/prompts          many tokens per row in a CUDA graph, which commits by itself

`OpenPass` is a pass that its caller ends: `commit` stores tokens, `abort` drops them. Both close it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from lamina.cache.backend import Backend
    from lamina.cache.counts import CountsLike
    from lamina.cache.memory import Memory


class Pass(Protocol):
    """A forward pass of up to T tokens over R rows."""

    T: int
    positions: Tensor
    """[R, T] the position of each new token in its row."""
    valid: Tensor | None
    """[R, T] False for padding; None: no token is padding as far as model code is concerned."""
    all_counts: Tensor
    """[R] how many of the T tokens of each row are real."""
    logits: Tensor | None
    """[R, T, vocab], or [R, vocab] of each row's last real token; set by `model.forward`."""
    hidden: dict[int, Tensor]
    """[R, T, width] by layer, those that were asked for."""

    @property
    def backend(self) -> Backend[Any, Any]:
        """What computes the memory calls."""
        ...

    def memory(self, i: int) -> Memory:
        """What layer i of the model is given."""
        ...

    def last(self, x: Tensor) -> Tensor:
        """x [R, T, width] -> [R, width] of each row's last real token"""
        ...

    def has_run(self, ids: Tensor | None) -> None:
        """Every block has run in this pass, over these ids [R, T]; None where embeddings were fed."""
        ...


def last_tokens(x: Tensor, counts: Tensor) -> Tensor:
    """x [R, T, width], counts [R] of real tokens -> [R, width] of each row's last one; any for a row without tokens"""
    if x.shape[1] > 1:
        last = (counts - 1).clamp(min=0)
        x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
    return x[:, 0]


class OpenPass(Pass, Protocol):
    """A pass whose caller decides how many tokens are kept."""

    def commit(self, accepted: CountsLike | None = None) -> None:
        """Stores each row's first `accepted` tokens (all real ones when None), advances the clock, and closes."""
        ...

    def abort(self) -> None:
        """Drops the pass, and closes: the cache is as it was before it."""
        ...

    def close(self) -> None:
        """Releases what the pass held. Whatever is committed stays."""
        ...
