"""The target "executorch": all programs as methods of one .pte file, for ExecuTorch on phones and other small machines.

The methods share their weights, which are in the file once, and the cache, whose tensors are mutable buffers that are
in no file: ExecuTorch allocates them, and every method reads and writes the same ones. So a host feeds ids and nothing
else; since it may have no other way to reach the cache, `rewind` and `reset` are methods too. Manifest and tokenizer
follow the program in the same file (archive.py).
"""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from lamina.cache.io.checked_file import replace_file
from lamina.errors import CacheFileError, ProgramError
from lamina.exporting.archive import PTE, Writer, checksum
from lamina.exporting.export import Exported
from lamina.exporting.onnx import has_operation, solve_unit_lower
from lamina.exporting.runners import EXECUTORCH_NEEDS, errors_only

aten = torch.ops.aten


def lower_to(exported: Exported, path: str | os.PathLike[str]) -> None:
    """Lowers every program to ExecuTorch and writes a .pte file. If that fails, a file that was there is unchanged.

    >>> lower_to(lamina.export(model, rows=1, capacity=1024, target="executorch"), "model.pte")    # doctest: +SKIP
    """
    made = lowered(exported.programs)
    check_kernels(made.executorch_program.execution_plan)
    # The weights are in the program, and nothing else may ask for them.
    described = replace(exported, manifest=replace(exported.manifest, target="executorch", weights={}))
    try:
        with replace_file(path) as file:
            made.write_to_file(file)
            file.seek(0)
            facts = checksum(file)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                writer = Writer(archive)
                writer.files[PTE] = facts
                described.write(writer, programs=False)
    except CacheFileError as error:
        raise ProgramError(str(error)) from None


def lowered(programs: dict[str, ExportedProgram]) -> Any:
    """The programs as methods of one ExecutorchProgramManager."""
    try:
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
        from executorch.exir.passes import MemoryPlanningPass
    except ImportError as error:
        raise ProgramError(f"ExecuTorch is not whole, {error.name} is missing: {EXECUTORCH_NEEDS}") from error
    # A linear layer that is decomposed transposes its weight in every call. The checker does not know the minimum of
    # two sizes (sym_min), which the runtime has.
    edge_config = EdgeCompileConfig(preserve_ops=[aten.linear.default], _check_ir_validity=False)
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(share_mutable_buffers=True), emit_mutable_buffer_names=True
    )
    try:
        with quietly():
            edge = to_edge({name: fitted(program) for name, program in programs.items()}, compile_config=edge_config)
            return edge.to_executorch(config)
    except Exception as error:  # ExecuTorch raises errors of many kinds
        raise ProgramError(f"ExecuTorch cannot lower this model: {type(error).__name__}: {error}") from error


def check_kernels(methods: Sequence[Any]) -> None:
    """Raises if the runtime lacks a kernel that a method needs: a file would be written that nothing can load."""
    from executorch.runtime import Runtime

    known = set(Runtime.get().operator_registry.operator_names)
    for method in methods:
        needed = {f"{one.name}.{one.overload}" if one.overload else one.name for one in method.operators}
        if lacking := sorted(needed - known):
            raise ProgramError(
                f"ExecuTorch has no kernel for {', '.join(lacking)}, which {method.name} needs: use another target"
            )


def fitted(program: ExportedProgram) -> ExportedProgram:
    """The program without operations that ExecuTorch lacks, or computes otherwise than PyTorch."""
    if has_operation(program, aten.linalg_solve_triangular.default):
        table: Any = torch.export.default_decompositions()  # all at once: half of them would fix strides that change
        table[aten.linalg_solve_triangular.default] = solve_unit_lower
        table.pop(aten.linear.default)
        program = program.run_decompositions(table)
    for node in list(program.graph.nodes):
        if node.target in (aten.remainder.Scalar, aten.remainder.Tensor):
            replace_remainder(node)
    program.graph_module.recompile()
    return program


def replace_remainder(node: Node) -> None:
    """Puts x − ⌊x / n⌋ · n in the place of a node that is the remainder of x by n, with the sign of n. ExecuTorch's own
    remainder of a negative integer has the sign of x."""
    x, n = node.args

    def call(operation: Any, *given: Any, **options: Any) -> Node:
        made = node.graph.call_function(operation, given, options)
        made.meta["val"] = operation(*(one.meta["val"] if isinstance(one, Node) else one for one in given), **options)
        return made

    kind = "Tensor" if isinstance(n, Node) and isinstance(n.meta["val"], Tensor) else "Scalar"
    with node.graph.inserting_before(node):
        quotient = call(getattr(aten.div, f"{kind}_mode"), x, n, rounding_mode="floor")
        whole = call(getattr(aten.mul, kind), quotient, n)
        node.replace_all_uses_with(call(aten.sub.Tensor, x, whole))
    node.graph.erase_node(node)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warning that buffers have no values in the file, which is intended, and notes on PyTorch's types."""
    with warnings.catch_warnings(), errors_only(""):
        warnings.filterwarnings("ignore", message="Mutation on a buffer in the model is detected")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
