"""`Rule`: the recurrence of a recurrent layer, without its weights: maps (state, token) to (output, new state).

Padding, masking and chunking rely on one convention: **a token whose inputs are all zero does not change the state**
(log decays and step sizes are inputs: zero there keeps the state and adds nothing). Masked tokens are set to zero,
which also removes NaN, and sequences are padded with zeros to whole chunks.

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
from lamina.tracing import cast

Tensors = Mapping[str, Tensor]


class Rule(ABC):
    """A recurrence: pure arithmetic on a state, with no parameters inside.

    Subclasses are frozen dataclasses, so rules can be compared and hashed. Arithmetic runs in the state's dtype
    (float32, from `zero_state`); outputs have the dtype of the input named by `value`. No argument is written to; with
    zero tokens the given state itself is returned, not a copy.
    """

    value: ClassVar[str]
    """Name of the input whose shape and dtype outputs have."""
    longest_chunk: ClassVar[int]
    """The most tokens in a chunk."""
    most_at_once: ClassVar[int] = 64
    """The most tokens that `at_once` takes."""
    exact: ClassVar[tuple[str, ...]] = ()
    """Names of inputs that models compute in float32 whatever their dtype, and that are stored in float32."""

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's state."""

    @property
    @abstractmethod
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The inputs of one token: name -> shape, always in the same order."""

    @abstractmethod
    def step(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        """One token per row: state [B, *state_shape], inputs [B, *shape] -> (out [B, ...], new state)."""

    @abstractmethod
    def chunks(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        """Whole chunks: inputs [B, K, L, *shape] in the state's dtype -> (out [B, K, L, ...], new state)."""

    @abstractmethod
    def scratch_per_token(self, length: int) -> int:
        """About how many temporary values `chunks` needs per token, in chunks of `length` tokens."""

    def at_once(self, state: Tensor, inputs: Tensors, constants: Tensors) -> tuple[Tensor, Tensor]:
        """Up to `most_at_once` tokens without a loop over them, for exported programs, in which T varies.

        inputs [B, T, *shape] in the state's dtype -> (out [B, T, ...], new state). By default they are one chunk.
        """
        out, state = self.chunks(state, {name: x[:, None] for name, x in inputs.items()}, constants)
        return out[:, 0], state

    def before(self, inputs: Tensors, **around: Any) -> Tensors:
        """Prepares a model's projections as inputs of the rule; `around` is that of `memory.recur`."""
        return inputs

    def after(self, out: Tensor, inputs: Tensors, **around: Any) -> Tensor:
        """Post-processes the rule's output (skip connection, gate); `around` is that of `memory.recur`."""
        return out

    def zero_state(self, rows: int, device: torch.device | str | None = None) -> Tensor:
        """The state of `rows` rows before their first token."""
        return torch.zeros(rows, *self.state_shape, dtype=torch.float32, device=device)

    def scan(
        self, state: Tensor, inputs: Tensors, constants: Tensors, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The reference for `chunk`: token by token."""
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
        """T tokens per row, continuing from `state`: inputs [B, T, *shape] -> (out [B, T, ...], new state).

        Where `valid` [B, T] is False there is no token: whatever the inputs hold there, NaN included, it changes
        neither the state nor any other output.
        """
        tokens = self._tokens(state, inputs)
        inputs = _masked(inputs, valid)
        like = inputs[self.value]
        if tokens == 0:
            return torch.zeros_like(like), state
        if tokens == 1:
            out, new = self.step(state, {name: x[:, 0] for name, x in inputs.items()}, constants)
            out = out[:, None]
        elif torch.compiler.is_exporting():
            out, new = self.at_once(state, {name: cast(x, state.dtype) for name, x in inputs.items()}, constants)
        else:
            out, new = self._pieces(state, inputs, constants, tokens)
        # Zero inputs keep the value of a finite state; selecting by row keeps every bit of any state.
        return cast(out, like.dtype), new if valid is None else _where_row(valid.any(1), new, state)

    def _pieces(self, state: Tensor, inputs: Tensors, constants: Tensors, tokens: int) -> tuple[Tensor, Tensor]:
        """Runs as many rows and chunks at once as the scratch memory allows."""
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
        """Checks every shape and returns the number of tokens T."""
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
    """Step sizes from the projected dt: softplus(dt + dt_bias), in the bias's dtype, clamped to `dt_limit`."""
    if dt_bias is None:
        return inputs
    dt = F.softplus(inputs["dt"] + dt_bias)
    return {**inputs, "dt": dt if dt_limit is None else dt.clamp(*dt_limit)}


def skip_and_gate(out: Tensor, x: Tensor, skip: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """out + skip · x, then · silu(gate) in the gate's dtype."""
    if skip is not None:
        out = out + skip * x
    return out if gate is None else (out * F.silu(gate.to(out.dtype))).to(gate.dtype)


def scan_by_doubling(decay: Tensor, added: Tensor, state: Tensor, most: int) -> Tensor:
    """h_t = decay_t · h_(t-1) + added_t for each of up to `most` tokens, from h_(-1) = state [B, ...].

    decay, added [B, T, ...] -> h [B, T, ...]. After the round with distance d, each token has the 2·d tokens up to
    itself: log2(most) rounds, whatever T is.

    >>> scan_by_doubling(torch.full((1, 3), 0.5), torch.ones(1, 3), torch.full((1,), 4.0), most=4).tolist()
    [[3.0, 2.5, 2.25]]
    """
    distance = 1
    while distance < most:
        added = torch.addcmul(added, decay, shifted(added, distance, 0.0))
        decay = decay * shifted(decay, distance, 1.0)
        distance *= 2
    return torch.addcmul(added, decay, state[:, None])


def shifted(x: Tensor, distance: int, fill: float) -> Tensor:
    """x [B, T, ...], each token replaced by the one `distance` before it; `fill` where there is none."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (distance, 0), value=fill)[:, : x.shape[1]]


def segment_sums(logs: Tensor) -> Tensor:
    """Sums over every interval of a chunk: [..., L] -> [..., L, L].

    Entry (l, s) is logs[s+1] + ... + logs[l], and -inf for s > l. Each interval is summed by itself: the difference of
    two cumulative sums would lose a small log decay after a large one, and would be NaN after one of -inf.

    >>> segment_sums(torch.tensor([-1.0, -2.0, -4.0])).tolist()
    [[0.0, -inf, -inf], [-2.0, 0.0, -inf], [-6.0, -4.0, 0.0]]
    """
    length = logs.shape[-1]
    lower = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
    # Column s holds logs[l] for l > s, so its cumulative sum over l is the sum of the interval.
    sums = torch.where(lower.tril(-1), logs[..., :, None], 0.0).cumsum(-2)
    return sums.masked_fill(~lower, -torch.inf)


def _scratch(state: Tensor) -> int:
    """How many temporary values `chunk` may hold at once; longer sequences are computed in pieces.

    On the CPU, pieces that fit its caches are fastest; elsewhere, and in a compiled graph, the fewest operations are.
    """
    return 2**20 if state.device.type == "cpu" and not torch.compiler.is_compiling() else 2**26


def _masked(inputs: Tensors, valid: Tensor | None) -> Tensors:
    """The inputs with zeros in place of masked tokens."""
    if valid is None:
        return inputs
    return {name: x.masked_fill(_by_row(~valid, x), 0) for name, x in inputs.items()}


def _where_row(chosen: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(_by_row(chosen, new), new, old)


def _by_row(mask: Tensor, like: Tensor) -> Tensor:
    """Reshapes a mask over the leading dimensions to broadcast against `like`."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))
