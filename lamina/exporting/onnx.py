"""The target "onnx": each program as an ONNX model, for onnxruntime and other runtimes.

ONNX has no tensors that a model keeps, so the cache is inputs and outputs: a program NAME.onnx takes its own inputs and
then every tensor of the cache, and returns its own outputs and then every tensor of the cache after the pass. The
archive is a folder; all models refer to the one weights.bin beside them.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lamina.errors import ProgramError
from lamina.exporting.archive import Writer, new_folder
from lamina.exporting.export import Exported
from lamina.exporting.runners import errors_only


class Functional(nn.Module):
    """A program that changes no tensor: takes the cache after its own inputs, and returns it after its outputs."""

    def __init__(self, program: ExportedProgram, names: list[str], inputs: int) -> None:
        super().__init__()
        self.program, self.names, self.inputs = program.module(check_guards=False), names, inputs

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        held = {name: tensor.clone() for name, tensor in zip(self.names, given[self.inputs :], strict=True)}
        made = torch.func.functional_call(self.program, held, given[: self.inputs])
        return (*((made,) if isinstance(made, Tensor) else made), *held.values())


def convert_to(exported: Exported, path: str | os.PathLike[str]) -> None:
    """Converts every program and writes a folder.

    >>> convert_to(lamina.export(model, rows=1, capacity=1024, target="onnx"), "model.onnx")      # doctest: +SKIP
    """
    import onnx_ir  # which onnxscript brings

    models = {name: converted_model(name, program, exported) for name, program in exported.programs.items()}
    converted = replace(exported, manifest=replace(exported.manifest, target="onnx"))
    with new_folder(path) as folder:
        writer = Writer(folder)
        converted.write(writer, programs=False, manifest=False)
        for name, model in models.items():
            for key, value in model.graph.initializers.items():
                entry = exported.manifest.weights.get(key)
                if entry is not None:
                    held = exported.manifest.weights[entry.get("same", key)]
                    tensor = value.const_value
                    value.const_value = onnx_ir.ExternalTensor(
                        "weights.bin", held["offset"], tensor.nbytes, tensor.dtype, shape=tensor.shape, name=key,
                        base_dir=folder,
                    )  # fmt: skip
            onnx_ir.save(model, folder / f"{name}.onnx")
            writer.add_file(f"{name}.onnx")
            check_runs(folder, name)
        converted.write_manifest(writer)


def check_runs(folder: Path, name: str) -> None:
    """Raises if onnxruntime cannot run a model that was written."""
    try:
        import onnxruntime
    except ImportError:  # the file is for another machine
        return
    try:
        onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common class
        reason = " ".join(str(error).split())
        raise ProgramError(
            f"onnxruntime cannot run {name} of this model: {reason}. If it is not float32, load it with "
            "dtype='float32'; otherwise use another target"
        ) from error


def converted_model(name: str, program: ExportedProgram, exported: Exported) -> Any:
    """One program as an onnx_ir.Model."""
    signature = exported.manifest.programs[name]
    names = used_cache(program, exported)
    sizes: list[dict[int, Any]] = []
    inputs: list[Tensor] = []
    for what, one in signature["inputs"].items():
        varies = {axis: n for axis, n in enumerate(one["shape"]) if not isinstance(n, int)}
        shape = [n if isinstance(n, int) else min(n[1] - 1, n[0] + 1) for n in one["shape"]]
        inputs.append(torch.zeros(shape, dtype=getattr(torch, one["dtype"])))
        sizes.append({axis: torch.export.Dim(f"{what}_{axis}", min=n[0], max=n[1]) for axis, n in varies.items()})
    functional = Functional(program, names, len(inputs))
    cache = [exported.cache[key].clone() for key in names]
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        traced = torch.export.export(
            functional, (*inputs, *cache), dynamic_shapes=((*sizes, *({} for _ in cache)),), strict=False
        )
    solve = torch.ops.aten.linalg_solve_triangular.default
    if has_operation(traced, solve):
        traced = traced.run_decompositions({solve: solve_unit_lower})
    outputs = [f"output_{i}" for i in range(len(signature["outputs"]))]
    try:
        with errors_only("torch.onnx._internal.exporter._registration"):  # it warns that torchvision is missing
            made = torch.onnx.export(
                traced, dynamo=True, verbose=False, optimize=True,
                input_names=[*signature["inputs"], *names], output_names=[*outputs, *(f"{key}_after" for key in names)],
            )  # fmt: skip
    except Exception as error:  # PyTorch's exporter raises errors of many kinds
        lacking = sorted(set(re.findall(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))))
        reason = f"ONNX has no {', '.join(lacking)}" if lacking else " ".join(str(error).split())
        raise ProgramError(f"{reason}, which {name} needs: use another target") from error
    assert made is not None
    model = made.model
    for key in list(model.graph.initializers):  # the names of the weights, without those of the module around them
        value = model.graph.initializers.pop(key)
        value.name = key.removeprefix("program.")
        model.graph.initializers[value.name] = value
    return model


def has_operation(program: ExportedProgram, operation: Any) -> bool:
    """True if a program calls this operation of PyTorch."""
    return any(node.target is operation for node in program.graph.nodes)


def solve_unit_lower(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """x of a·x = b for a unit lower triangular a [.., n, n], in products alone: ONNX has no solver.

    a is I − N, and N^n = 0, so the inverse is I + N + … + N^(n−1) = (I + N)·(I + N²)·(I + N⁴) …
    """
    assert unitriangular and left and not upper
    size = a.shape[-1]  # where it varies: enough products for the largest size, of which later ones add nothing
    most = size if isinstance(size, int) else int(size.node.shape_env.bound_sympy(size.node.expr).upper)
    n = (-a).tril(-1)
    x, power = b, 1
    while power < most:
        x, n, power = x + n @ x, n @ n, 2 * power
    return x


def used_cache(program: ExportedProgram, exported: Exported) -> list[str]:
    """The tensors of the cache that a program reads or writes."""
    targets = {spec.target for spec in program.graph_signature.input_specs}
    return [name for name in exported.cache if name in targets]
