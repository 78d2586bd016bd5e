"""Removes from a traced program what it does not need to run: no-op casts, checks of dtypes, notes on source code."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")
aten = torch.ops.aten


def tidy(program: ExportedProgram) -> ExportedProgram:
    """The same program in fewer operations, without paths and names of the code that it was traced from."""
    graph = program.graph
    for node in list(graph.nodes):
        for note in NOTES:
            node.meta.pop(note, None)
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif (
            node.target is aten.to.dtype
            and node.meta["val"].dtype == node.args[0].meta["val"].dtype
            and all(user.op != "output" for user in node.users)  # the signature names outputs
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program
