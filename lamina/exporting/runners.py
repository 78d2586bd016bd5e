"""Runners: what calls the programs of an archive. One for each target."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from lamina.errors import ProgramError
from lamina.exporting.archive import PTE, Archive
from lamina.exporting.manifest import DTYPES, Manifest, as_words, shape_and_dtype

ONNX_NEEDS = "pip install onnx onnxscript onnxruntime"
EXECUTORCH_NEEDS = "pip install executorch"

Tensors = dict[str, Tensor]
TYPES = {name: f"tensor({name})" for name in DTYPES} | {
    "float32": "tensor(float)", "float64": "tensor(double)", "float8_e4m3fn": "tensor(float8e4m3fn)",
    "float8_e5m2": "tensor(float8e5m2)",
}  # fmt: skip
"""dtype -> its name in onnxruntime"""


class Runner(Protocol):
    cache: Tensors
    """Every tensor of the cache, by the names of the manifest."""

    def run(self, name: str, *inputs: Tensor) -> Any:
        """Calls a program, which reads and writes the tensors of the cache in place."""


class TorchRunner:
    """Programs of torch.export, run operation by operation by PyTorch."""

    def __init__(self, modules: Mapping[str, Callable[..., Any]], cache: Tensors) -> None:
        self.modules, self.cache = modules, cache

    def run(self, name: str, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self.modules[name](*inputs)


def runner_of(archive: Archive) -> Runner:
    """The runner for the target of an archive, over a new cache that is empty."""
    manifest = archive.manifest
    match manifest.target:
        case "executorch":
            return ExecuTorchRunner(archive)
        case "onnx":
            return OnnxRunner(archive, new_cache(manifest))
        case "pt2" | "aotinductor":
            weights, cache = {k: w.to(manifest.device) for k, w in archive.weights().items()}, new_cache(manifest)
            if manifest.target == "aotinductor":
                return CompiledRunner(archive, weights, cache)
            modules = {name: load_program(archive, name, weights, cache) for name in manifest.programs}
            return TorchRunner(modules, cache)
    raise ProgramError(f"{archive.path} is for the target {manifest.target!r}, which this Lamina does not run")


def new_cache(manifest: Manifest) -> Tensors:
    """The tensors of an empty cache."""
    return {
        name: torch.zeros(one["shape"], dtype=DTYPES[one["dtype"]], device=manifest.device)
        for name, one in manifest.cache.items()
    }


@contextmanager
def errors_only(logger: str) -> Iterator[None]:
    """Silences what a logger says below the level of errors."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def load_program(archive: Archive, name: str, weights: Mapping[str, Tensor], cache: Mapping[str, Tensor]) -> nn.Module:
    """A program of the archive over these weights and this cache."""
    try:
        with errors_only("torch._export.serde.serialize"):  # it warns of named sizes that no operation uses
            program = torch.export.load(io.BytesIO(archive.read(f"programs/{name}.pt2")))
    except (RuntimeError, ValueError, KeyError) as error:
        versions = archive.manifest.versions
        raise ProgramError(
            f"program {name} of {archive.path} was written by PyTorch {versions.get('torch')}, and PyTorch "
            f"{torch.__version__} cannot read it: {error}"
        ) from error
    for spec in program.graph_signature.input_specs:
        target = spec.target
        if spec.kind == InputKind.USER_INPUT or target is None:
            continue
        held = program.state_dict if target in program.state_dict else program.constants
        found = cache.get(target, weights.get(target))
        if found is None or found.shape != held[target].shape or found.dtype != held[target].dtype:
            raise ProgramError(needs(archive, name, target))
        held[target] = nn.Parameter(found, requires_grad=False) if spec.kind == InputKind.PARAMETER else found
    return program.module()


class CompiledRunner:
    """Programs of AOTInductor over these weights and this cache."""

    def __init__(self, archive: Archive, weights: Mapping[str, Tensor], cache: Tensors) -> None:
        self.programs: dict[str, Any] = {}
        self.cache = cache
        self.kept = [*weights.values(), *cache.values()]  # the libraries hold pointers to them
        for name in archive.manifest.programs:
            archive.check(f"programs/{name}.pt2")
            program = torch._inductor.aoti_load_package(str(archive.path / "programs" / f"{name}.pt2"))
            compiled_for = program.loader.get_metadata()  # dtype and shape by name: the library checks neither
            needed = {}
            for fqn in program.get_constant_fqns():
                found = cache.get(fqn, weights.get(fqn))
                if found is None or as_words(shape_and_dtype(found)) != compiled_for.get(fqn):
                    raise ProgramError(needs(archive, name, fqn))
                needed[fqn] = found
            program.load_constants(needed, check_full_update=True, user_managed=True)
            self.programs[name] = program

    def run(self, name: str, *inputs: Tensor) -> Any:
        return self.programs[name](*inputs)


def needs(archive: Archive, program: str, name: str) -> str:
    """The error if the manifest lacks a tensor, or has it in another shape or dtype."""
    return f"{archive.path} has no {name} as program {program} needs it. Export the model again"


class OnnxRunner:
    """ONNX models in onnxruntime, on the CPU. A pass writes a new cache, which takes the place of the old one."""

    def __init__(self, archive: Archive, cache: Tensors) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise ProgramError(f"{archive.path} is for onnxruntime, which is not installed: {ONNX_NEEDS}") from None
        self.cache = cache
        self.manifest = archive.manifest
        for name in archive.manifest.files:
            archive.check(name)  # since onnxruntime reads the files itself
        self.sessions: Mapping[str, Any] = {
            name: onnxruntime.InferenceSession(str(archive.path / f"{name}.onnx"), providers=["CPUExecutionProvider"])
            for name in archive.manifest.programs
        }
        for name, session in self.sessions.items():
            inputs = self.manifest.programs[name]["inputs"]
            for one in session.get_inputs():
                if one.name in inputs:
                    continue
                held = self.manifest.cache.get(one.name)
                if held is None or TYPES[held["dtype"]] != one.type or held["shape"] != one.shape:
                    raise ProgramError(needs(archive, name, one.name))

    def run(self, name: str, *inputs: Tensor) -> Any:
        session, signature = self.sessions[name], self.manifest.programs[name]
        given = dict(zip(signature["inputs"], inputs, strict=True))
        given |= {one.name: self.cache[one.name] for one in session.get_inputs() if one.name not in given}
        made = session.run(None, {key: tensor.numpy() for key, tensor in given.items()})
        outputs = []
        for one, value in zip(session.get_outputs(), made, strict=True):
            tensor = torch.from_numpy(value)
            if one.name.endswith("_after"):
                self.cache[one.name.removesuffix("_after")].copy_(tensor)
            else:
                outputs.append(tensor)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class ExecuTorchRunner:
    """The methods of a .pte file in ExecuTorch, on the CPU. ExecuTorch holds the cache; `cache` are views of it."""

    def __init__(self, archive: Archive) -> None:
        try:
            from executorch.runtime import Runtime
        except ImportError as error:
            raise ProgramError(
                f"{archive.path} is for ExecuTorch, which is not installed ({error.name}): {EXECUTORCH_NEEDS}"
            ) from None
        archive.check(PTE)  # since ExecuTorch reads the file itself
        try:
            program = Runtime.get().load_program(archive.path)
            self.methods: Mapping[str, Any] = {name: program.load_method(name) for name in archive.manifest.programs}
        except RuntimeError as error:  # what is missing was written to standard error
            raise ProgramError(f"ExecuTorch cannot load {archive.path}: {error}. Export the model again") from error
        # The method `reset` writes every tensor of the cache, so it has all of them.
        held = self.methods["reset"]._method
        self.cache: Tensors = {}
        for name, one in archive.manifest.cache.items():
            try:
                self.cache[name] = held.get_attribute(name)
            except RuntimeError:
                raise ProgramError(needs(archive, "reset", name)) from None
            if shape_and_dtype(self.cache[name]) != one:
                raise ProgramError(needs(archive, "reset", name))
        for tensor in self.cache.values():
            tensor.zero_()

    def run(self, name: str, *inputs: Tensor) -> Any:
        made = self.methods[name].execute([one.contiguous() for one in inputs])
        return made[0] if len(made) == 1 else tuple(made)
