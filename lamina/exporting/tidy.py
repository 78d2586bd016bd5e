"""Removes from a traced program what it does not need to run: no-op casts, checks of dtypes, notes on source code; and
names its constants."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

NOTES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")
aten = torch.ops.aten


def tidy(program: ExportedProgram, name: str) -> ExportedProgram:
    """The same program in fewer operations, without paths and names of the code that it was traced from.

    Constants that belong to no module become buffers NAME_constant_I: compilers rename constants, and two programs of
    one archive may use the same name for different ones.
    """
    graph = program.graph
    constants = [spec for spec in program.graph_signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR]
    for i, spec in enumerate(constants):
        assert spec.target is not None
        value, spec.target = program.constants.pop(spec.target), f"{name}_constant_{i}"
        program.constants[spec.target] = value
        spec.kind, spec.persistent = InputKind.BUFFER, False
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
