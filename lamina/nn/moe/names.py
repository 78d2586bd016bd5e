"""Checkpoint names of experts: entries of a family's `names` table for the layouts that checkpoints use.

Checkpoints on the Hub mostly have one tensor for each expert and matrix, others one stack for each layer. Both are
covered, whichever the checkpoint has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lamina.checkpoint.names import Either, From, Single, Stack, Value

GATED = ("gate_proj", "up_proj", "down_proj")


def expert_names(
    ours: str, *theirs: str, parts: tuple[str, ...] = GATED, expert: str = "{e}", up_stack: str = "gate_up_proj"
) -> dict[str, Value]:
    """Experts stored one by one, with a checkpoint name such as theirs.3.gate_proj.weight, or as stacks,
    theirs.gate_up_proj [E, 2 · inner, width] and theirs.down_proj.

    ours       path of an `Experts`
    theirs     prefix of the experts in the checkpoint; several: whichever it has
    parts      names of gate, up and down (w1, w3 and w2 in Mixtral), or of up and down if the experts are not gated
    expert     name of one expert below `theirs`
    up_stack   name of the stack that joins gate and up

    >>> list(expert_names("blocks.{i}.mlp.experts", "model.layers.{i}.mlp.experts"))
    ['blocks.{i}.mlp.experts.gate_up', 'blocks.{i}.mlp.experts.down']
    """
    *first, down = parts
    up: list[Single] = [Stack(tuple(f"{one}.{expert}.{part}.weight" for part in first)) for one in theirs]
    back: list[Single] = [Stack(f"{one}.{expert}.{down}.weight") for one in theirs]
    gated = len(first) == 2
    up += [f"{one}.{up_stack if gated else 'up_proj'}" for one in theirs]
    back += [f"{one}.down_proj" for one in theirs]
    return {f"{ours}.{'gate_up' if gated else 'up'}": Either(*up), f"{ours}.down": Either(*back)}


def linear_stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Granite: stacks in `input_linear` and `output_linear`, or in `experts`. `theirs` is the prefix of the mixture."""
    return {
        f"{ours}.gate_up": Either(f"{theirs}.input_linear.weight", f"{theirs}.experts.gate_up_proj"),
        f"{ours}.down": Either(f"{theirs}.output_linear.weight", f"{theirs}.experts.down_proj"),
    }


def swapped_stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """Llama 4: stacks of transposed matrices, gate_up_proj [E, width, 2 · inner] and down_proj [E, inner, width]."""
    return {
        f"{ours}.gate_up": From(f"{theirs}.gate_up_proj", swapped),
        f"{ours}.down": From(f"{theirs}.down_proj", swapped),
    }


def interleaved_stack_names(ours: str, theirs: str) -> dict[str, Value]:
    """GPT-OSS: stacks of transposed matrices and biases, in which rows of gate and up alternate."""
    return {
        f"{ours}.gate_up": From(f"{theirs}.gate_up_proj", lambda t: gates_first(swapped(t))),
        f"{ours}.gate_up_bias": From(f"{theirs}.gate_up_proj_bias", gates_first),
        f"{ours}.down": From(f"{theirs}.down_proj", swapped),
        f"{ours}.down_bias": f"{theirs}.down_proj_bias",
    }


def swapped(stack: Tensor) -> Tensor:
    """[E, in, out] <-> [E, out, in]"""
    return stack.transpose(1, 2)


def gates_first(stack: Tensor) -> Tensor:
    """Rows [E, 2 · inner, ...] that alternate between gate and up -> all gates, then all ups

    >>> gates_first(torch.tensor([[10, 20, 11, 21]]))
    tensor([[10, 11, 20, 21]])
    """
    return torch.cat((stack[:, ::2], stack[:, 1::2]), 1)
