"""What a pass holds besides weights and cache, found by running it on the meta device, where nothing has memory.

Tensors are made and freed there as in a real pass, so the peak equals that of a real pass to the byte: activations,
masks, what layers leave for commit, new states and logits. PyTorch's attention is assumed to be fused, as it is unless
scores are changed.

A pass of a GPU is rehearsed as a GPU runs it: with `PromptBackend`, and with the attention of prompts. Launches do
nothing (`lamina.kernels.launch.dry`). What the function around a kernel allocates (outputs, lists of blocks, states of
chunks) is allocated on the meta device too, so it is counted without a formula of its own.

Most of a pass is repetition: blocks of one kind, chunks of one recurrence. They are run until it is known how much one
of them holds, and from then on only counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lamina import kernels
from lamina.cache.cache import Cache
from lamina.cache.spec import Recurrent
from lamina.kernels.limits import CARDS, assumed
from lamina.rehearsal.meter import AllocationMeter, Trace, shape_of
from lamina.runtime.compile import kind_of

if TYPE_CHECKING:
    from lamina.model import Model


class Fused(TorchFunctionMode):
    """Attention as one kernel that allocates nothing but its output, in the memory layout of PyTorch's kernels."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        q, v = given["query"], given["value"]
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)  # [B, T, H, D]


class Rehearsal:
    """Passes of a model on the meta device, which nobody else may use: its blocks and rules are made to count.

    gpu   passes are those of a GPU
    """

    def __init__(self, model: Model, gpu: bool = False) -> None:
        self.held, self.gpu = AllocationMeter(), gpu and kernels.installed()
        self.traces: dict[Hashable, Trace | None] = {}
        specs = [spec for entry in model.specs for spec in entry.values()]
        stacks = [getattr(module, "blocks", None) for module in model.modules()]  # of the model, and of its encoder
        blocks = {id(block): block for stack in stacks if isinstance(stack, nn.ModuleList) for block in stack}
        sources = {id(model.blocks[spec.reads_from[0]]) for spec in specs if spec.reads_from is not None}
        for key in blocks.keys() - sources:  # those keep tokens for others
            blocks[key].forward = self._block(blocks[key].forward, _kind(blocks[key]))
        for rule in {id(spec.rule): spec.rule for spec in specs if isinstance(spec, Recurrent)}.values():
            object.__setattr__(rule, "chunks", self._chunks(rule.chunks, rule))  # frozen, but ours alone

    def most(self, run: Callable[[], object]) -> int:
        """The most bytes that `run` holds at once; it runs a pass and leaves nothing."""
        self.held, self.traces = AllocationMeter(), {}
        with torch.device("meta"), torch.no_grad(), as_on_gpu(self.gpu), Fused(), self.held:
            run()
        return self.held.most

    def _block(self, forward: Callable[..., Tensor], kind: Hashable) -> Callable[..., Tensor]:
        """The first of a kind may make what all share (a mask); what the second holds is what each other holds."""

        def run(*args: Any) -> Tensor:
            if (trace := self.traces.get(kind)) is not None:
                return self.held.again(trace)
            out, trace = self.held.measured(lambda: forward(*args))
            self.traces[kind] = trace if kind in self.traces else None
            return out

        return run

    def _chunks(self, chunks: Callable[..., Any], rule: Hashable) -> Callable[..., Any]:
        def run(state: Tensor, inputs: dict[str, Tensor], constants: dict[str, Tensor]) -> Any:
            key = (rule, shape_of(state), *(shape_of(x) for x in inputs.values()))
            if (trace := self.traces.get(key)) is not None:
                return self.held.again(trace)
            out, self.traces[key] = self.held.measured(lambda: chunks(state, inputs, constants))
            return out

        return run


@contextmanager
def as_on_gpu(wanted: bool = True) -> Iterator[None]:
    """Inside, in this thread, passes on the meta device are those of a GPU: of the current one, or of an H200 if there
    is none."""
    if not wanted:
        yield
        return
    from lamina.kernels.launch import dry  # imports Triton

    present = kernels.INTERPRETED or torch.cuda.is_available()
    with kernels.rehearsed(), dry(), nullcontext() if present else assumed(CARDS[90]):
        yield


def shadow(model: Model) -> Model:
    """The same model on the meta device; no number is copied."""
    memo: dict[int, Any] = {
        id(model.__dict__[name]): None for name in ("tokenizer", "compiled", "_graphs") if name in model.__dict__
    }
    for x in [*model.parameters(), *model.buffers()]:
        empty: Tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        memo[id(x)] = nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty
    twin = copy.deepcopy(model, memo)
    twin.__dict__.pop("_graphs", None)
    return twin


def set_clock(cache: Cache, tokens: int) -> None:
    """Every row holds `tokens` tokens from now on, whatever the stores hold."""
    clock = cache.clock
    for mark in (clock.lengths, clock.written, clock.base):
        mark.fill_(tokens)
    clock.low, clock.high, clock.base_low = ([tokens] * cache.rows for _ in range(3))


def _kind(block: nn.Module) -> Hashable:
    """The same for blocks that differ in nothing but their numbers."""
    plain = tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None)
    )
    return kind_of(block), plain
