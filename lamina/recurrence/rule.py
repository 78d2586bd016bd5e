"""What a recurrent layer computes, apart from its weights: a rule maps (state, token) to (output, new state).

One convention carries padding, masking and chunking: **a token whose inputs are all zero leaves the state as
it was** (log decays and step sizes are inputs: zero there keeps everything and adds nothing). Masked tokens
are set to zero, which also removes any NaN they hold, and a sequence is filled up to whole chunks with zeros.

Shape letters: `B` rows, `T` tokens, `K` chunks, `L` tokens in a chunk, `H` heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.errors import InputError

Tensors = Mapping[str, Tensor]


class Rule(ABC):
    """A recurrence: pure arithmetic on a state, with no parameters inside.

    Subclasses are frozen dataclasses, so rules can be compared and hashed. Arithmetic runs in the state's
    dtype (float32, from `zero_state`); outputs have the dtype of the input named by `value`. No argument is
    written to, but with no tokens the given state itself is returned.
    """

    value: ClassVar[str]
    """The input that outputs are shaped and typed after."""
    longest_chunk: ClassVar[int]
    """Tokens in a chunk, at most."""
    exact: ClassVar[tuple[str, ...]] = ()
    """Inputs that models compute in float32 whatever their own dtype, and that are kept so."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""

    @property
    @abstractmethod
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """What one token brings: name -> shape, always in the same order."""

    @abstractmethod
    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        """One token a row: state [B, *state_shape], inputs [B, *shape] -> (out [B, ...], new state)."""

    @abstractmethod
    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        """Whole chunks: inputs [B, K, L, *shape] in the state's dtype -> (out [B, K, L, ...], new state)."""

    @abstractmethod
    def scratch_per_token(self, length: int) -> int:
        """About how many numbers `chunks` holds for each token of a row in chunks of `length` tokens."""

    def before(self, inputs: Tensors, **around: Any) -> Tensors:
        """The inputs as the rule takes them, from what a model has: see `around` of `memory.recur`."""
        return inputs

    def after(self, out: Tensor, inputs: Tensors, **around: Any) -> Tensor:
        """What the model wants, from what the rule gave."""
        return out

    def zero_state(self, rows: int, device: torch.device | str | None = None) -> Tensor:
        """The state of `rows` rows that have seen nothing."""
        return torch.zeros(rows, *self.state_shape, dtype=torch.float32, device=device)

    def scan(
        self, state: Tensor, inputs: Tensors, constants: Tensors, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The reference for `chunk`: one token after the other."""
        tokens = self._tokens(state, inputs)
        inputs = _masked(inputs, valid)
        outs = []
        for t in range(tokens):
            out, new = self.step(state, {name: x[:, t] for name, x in inputs.items()}, constants)
            state = new if valid is None else _where_row(valid[:, t], new, state)
            outs.append(out)
        return (torch.stack(outs, 1) if outs else torch.zeros_like(inputs[self.value])), state

    def chunk(
        self, state: Tensor, inputs: Tensors, constants: Tensors, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Many tokens a row, continuing from `state`: inputs [B, T, *shape] -> (out [B, T, ...], new state).

        Where `valid` [B, T] is False there is no token: whatever the inputs hold there, NaN included, the
        state stays exactly as it was and no other output changes.
        """
        tokens = self._tokens(state, inputs)
        inputs = _masked(inputs, valid)
        like = inputs[self.value]
        if tokens == 0:
            return torch.zeros_like(like), state
        if tokens == 1:
            out, new = self.step(state, {name: x[:, 0] for name, x in inputs.items()}, constants)
            out = out[:, None]
        else:
            out, new = self._pieces(state, inputs, constants, tokens)
        # Zeros keep the value of a finite state; the choice by row keeps every bit of any state.
        return out.to(like.dtype), new if valid is None else _where_row(valid.any(1), new, state)

    def _pieces(self, state: Tensor, inputs: Tensors, constants: Tensors, tokens: int) -> tuple[Tensor, Tensor]:
        """As many rows and chunks at once as the scratch memory allows."""
        count = -(-tokens // self.longest_chunk)
        length = -(-tokens // count)
        rows = state.shape[0]
        fit = max(1, _scratch(state) // (length * self.scratch_per_token(length)))  # chunks of one row
        if rows > fit:
            some = [
                self._pieces(state[r : r + fit], {n: x[r : r + fit] for n, x in inputs.items()}, constants, tokens)
                for r in range(0, rows, fit)
            ]
            return torch.cat([out for out, _ in some]), torch.cat([new for _, new in some])

        chunked = {}
        fill = count * length - tokens
        for name, shape in self.input_shapes.items():
            x = inputs[name].to(state.dtype)
            if fill:
                x = F.pad(x, (0, 0) * len(shape) + (0, fill))
            chunked[name] = x.unflatten(1, (count, length))  # [B, K, L, *shape]
        together = min(count, fit // max(1, rows))
        outs = []
        for k in range(0, count, together):
            piece = {name: x[:, k : k + together] for name, x in chunked.items()}
            out, state = self.chunks(state, piece, constants)
            outs.append(out.flatten(1, 2))
        return (torch.cat(outs, 1) if len(outs) > 1 else outs[0])[:, :tokens], state

    def _tokens(self, state: Tensor, inputs: Tensors) -> int:
        """The number of tokens T, after checking every shape."""
        shapes = self.input_shapes
        if set(inputs) != set(shapes):
            raise InputError(f"{type(self).__name__} takes the inputs {list(shapes)}, not {list(inputs)}")
        if tuple(state.shape[1:]) != self.state_shape:
            raise InputError(
                f"state has shape {list(state.shape)}, {self} needs [B, *{list(self.state_shape)}]; "
                "zero_state(rows) makes one"
            )
        rows, tokens = state.shape[0], inputs[self.value].shape[1]
        for name, shape in shapes.items():
            if tuple(inputs[name].shape) != (rows, tokens, *shape):
                raise InputError(
                    f"input {name!r} has shape {list(inputs[name].shape)}, {self} needs "
                    f"{[rows, tokens, *shape]} for {rows} rows of {tokens} tokens"
                )
        return tokens


def step_sizes(
    inputs: Tensors, dt_bias: Tensor | None = None, dt_limit: tuple[float, float] | None = None, **_: Any
) -> Tensors:
    """dt as projected becomes softplus(dt + dt_bias), in the bias's dtype, held to `dt_limit`."""
    if dt_bias is None:
        return inputs
    dt = F.softplus(inputs["dt"] + dt_bias)
    return {**inputs, "dt": dt if dt_limit is None else dt.clamp(*dt_limit)}


def skipped_and_gated(out: Tensor, x: Tensor, skip: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """out + skip · x, then · silu(gate) in the gate's dtype."""
    if skip is not None:
        out = out + skip * x
    return out if gate is None else (out * F.silu(gate.to(out.dtype))).to(gate.dtype)


def segment_sums(logs: Tensor) -> Tensor:
    """Sums over every stretch of a chunk: [..., L] -> [..., L, L].

    Entry (l, s) is logs[s+1] + ... + logs[l], and -inf for s > l. Each stretch is summed by itself: a
    difference of two running sums would lose a small log decay that follows a large one, and is NaN after
    one of -inf.

    >>> segment_sums(torch.tensor([-1.0, -2.0, -4.0])).tolist()
    [[0.0, -inf, -inf], [-2.0, 0.0, -inf], [-6.0, -4.0, 0.0]]
    """
    length = logs.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
    # Column s holds logs[l] from l = s + 1 on, so its running sum over l is the stretch's sum.
    sums = torch.where(lower.tril(-1), logs[..., :, None], 0.0).cumsum(-2)
    return sums.masked_fill(~lower, -torch.inf)


def _scratch(state: Tensor) -> int:
    """How many numbers `chunk` may hold at once beside its inputs and outputs; longer sequences go in pieces.

    On the CPU what fits its caches is quickest; elsewhere and in a compiled graph the fewest operations are.
    """
    return 2**20 if state.device.type == "cpu" and not torch.compiler.is_compiling() else 2**26


def _masked(inputs: Tensors, valid: Tensor | None) -> Tensors:
    """Zeros in place of masked tokens."""
    if valid is None:
        return inputs
    return {name: x.masked_fill(_by_row(~valid, x), 0) for name, x in inputs.items()}


def _where_row(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(_by_row(chosen, new), new, old)


def _by_row(mask: Tensor, like: Tensor) -> Tensor:
    """A mask over the leading dimensions, made to broadcast against `like`."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))
