"""`lamina.export`: a model and a cache of fixed capacity, as programs that run without Lamina's model code."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

import lamina
from lamina.cache.cache import Cache
from lamina.cache.codec.codec import Codecs
from lamina.cache.counts import check_int
from lamina.cache.io.checked_file import replace_file
from lamina.cache.io.fingerprint import Fingerprint
from lamina.cache.layers.base import Layer
from lamina.cache.layers.cross import CrossLayer
from lamina.cache.layers.recurrent import RecurrentLayer
from lamina.checkpoint.tokenizer import Tokenizer
from lamina.errors import CacheFileError, InputError, ProgramError
from lamina.exporting.archive import Writer, check_new, lay_out, program_bytes, weight_bytes
from lamina.exporting.manifest import NAMES, Manifest, shape_and_dtype
from lamina.exporting.modules import cache_tensors
from lamina.exporting.runners import EXECUTORCH_NEEDS, ONNX_NEEDS
from lamina.exporting.text import tokenizer_facts
from lamina.exporting.trace import SHORTEST, trace_all
from lamina.model import Model
from lamina.runtime.feed import feed
from lamina.tracing import portable_operations
from lamina.weights.inventory import packed_formats

TARGETS = ("pt2", "aotinductor", "onnx", "executorch")
PACKAGES = {"onnx": (("onnx", "onnxscript"), ONNX_NEEDS), "executorch": (("executorch",), EXECUTORCH_NEEDS)}
"""target -> packages that writing it needs, and how to install them"""
LONGEST = 512  # tokens a row of one prefill, if the layers set no smaller limit


@dataclass
class Exported:
    """What `export` made: the programs, their weights and cache, and the manifest.

    programs   name -> traced program (trace.py)
    weights    name -> weight or constant of any program
    cache      name -> buffer that the programs share, filled with zeros
    """

    programs: dict[str, ExportedProgram]
    weights: dict[str, Tensor]
    cache: dict[str, Tensor]
    manifest: Manifest
    tokenizer: Tokenizer | None
    generation_config: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the archive. If that fails, a file that was there before is unchanged."""
        try:
            with replace_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                self.write(Writer(archive))
        except CacheFileError as error:
            raise ProgramError(str(error)) from None

    def write(self, writer: Writer, programs: bool = True, manifest: bool = True) -> None:
        """Writes every entry, or all but the programs or the manifest, which comes last."""
        if self.manifest.weights:
            writer.write("weights.bin", weight_bytes(self.weights, self.manifest.weights))
        for name, program in self.programs.items() if programs else ():
            writer.write(f"programs/{name}.pt2", program_bytes(program))
        if self.tokenizer is not None:
            writer.write("tokenizer.json", self.tokenizer.backend.to_str())
            if "default" in self.tokenizer.templates:
                writer.write("chat_template.jinja", self.tokenizer.templates["default"])
        writer.write("generation_config.json", json.dumps(self.generation_config, indent=1))
        if manifest:
            self.write_manifest(writer)

    def write_manifest(self, writer: Writer) -> None:
        """Writes manifest.json, which names all files that were written before it."""
        writer.write("manifest.json", replace(self.manifest, files=dict(writer.files)).as_json())


def export(
    model: Model,
    rows: int = 1,
    capacity: int = 2048,
    *,
    to: str | os.PathLike[str] | None = None,
    slack: int = 0,
    codec: Codecs | None = None,
    chunk: int | None = None,
    source: int | None = None,
    bounded: bool = True,
    target: str | None = None,
) -> Exported:
    """Exports a model with a cache of `rows` rows and `capacity` slots, and writes it to `to` if given.

    slack     how many tokens sliding windows and recurrent states can be rewound by; full attention has no limit
    codec     how keys and values are quantized: "int8", "int4", … as in `model.new_cache`
    chunk     most tokens a row in one call of the prefill program; longer prompts take several
    source    longest source of an encoder–decoder model, in positions of the encoder
    bounded   True: full attention reads no further than the longest row, whose length the host gives to the program.
              False: it reads all slots under a mask, and shapes are the same for all steps
    target    what will run it: "pt2" (PyTorch, a file), "aotinductor" (compiled libraries, a folder), "onnx"
              (onnxruntime, a folder) or "executorch" (ExecuTorch, a file). None: "executorch" if `to` ends with .pte,
              otherwise "pt2"

    >>> lamina.export(model, rows=2, capacity=1024, to="model.pt2")       # doctest: +SKIP
    >>> lamina.Program.load("model.pt2").generate(["The sky is"])         # doctest: +SKIP
    """
    if target is None:
        target = "executorch" if to is not None and os.fspath(to).endswith(".pte") else "pt2"
    check_target(target, model.device, to)
    if formats := packed_formats(model):
        raise InputError(
            f'the weights of this model are packed ({", ".join(formats)}): export one of load(weights="plain")'
        )
    capacity = check_int("capacity", capacity)
    if capacity <= SHORTEST:
        raise InputError(f"capacity={capacity}: a program needs room for at least {SHORTEST + 1} tokens a row")
    longest = longest_prefill(model, capacity)
    chunk = longest if chunk is None else check_int("chunk", chunk)
    if not SHORTEST < chunk <= longest:
        raise InputError(
            f"chunk={chunk}: a prefill program of this model and capacity takes {SHORTEST + 1} to {longest} tokens"
        )
    if model.max_positions is not None and capacity > model.max_positions:
        raise InputError(f"capacity={capacity}: the model has positions for {model.max_positions}")
    # One slot more than is ever read: padding is written there, and tracing would treat a read of all as a case apart.
    cache = model.new_cache(rows, capacity=capacity + 1, slack=slack, codec=codec)
    positions = widen_sources(model, cache, source)
    if slack:
        fold_once(model, cache)
    with portable_operations(target in ("onnx", "executorch")):
        programs = trace_all(model, cache, capacity, chunk, bounded, positions, verbs=target == "executorch")
    buffers = cache_tensors(cache)
    weights = weights_of(programs, buffers)
    manifest = describe(model, cache, capacity, programs, weights, chunk, positions)
    found = Exported(programs, weights, buffers, manifest, model.tokenizer, dict(model.generation_defaults))
    if to is None:
        return found
    if target == "aotinductor":
        from lamina.exporting.aotinductor import compile_to  # which imports this module

        compile_to(found, to)
    elif target == "onnx":
        from lamina.exporting.onnx import convert_to  # which imports this module

        convert_to(found, to)
    elif target == "executorch":
        from lamina.exporting.executorch import lower_to  # which imports this module

        lower_to(found, to)
    else:
        found.save(to)
    return found


def check_target(target: str, device: torch.device, to: str | os.PathLike[str] | None) -> None:
    """Raises if the target cannot be written, before minutes are spent on tracing the model."""
    if target not in TARGETS:
        raise InputError(f"target={target!r}: it must be one of {', '.join(TARGETS)}")
    if target in PACKAGES:
        packages, install = PACKAGES[target]
        if not all(find_spec(name) for name in packages):
            raise ProgramError(f"the target {target} needs packages that are not installed: {install}")
        if device.type != "cpu":
            raise ProgramError(
                f"the target {target} is for CPUs, and the model is on {device}: load it with device='cpu'"
            )
    if target in ("aotinductor", "onnx") and to is not None:
        check_new(to)


def longest_prefill(model: Model, capacity: int) -> int:
    """The most tokens a row in one prefill: a recurrence sets a limit, since its tokens are computed at once."""
    rules = [spec.rule for entry in model.specs for spec in entry.values() if hasattr(spec, "rule")]
    return min([LONGEST, capacity, *(rule.most_at_once for rule in rules)])


def widen_sources(model: Model, cache: Cache, source: int | None) -> int:
    """Makes room for the keys and values of a source. -> positions of the longest source, 0 if the model reads none"""
    layers = [layer for layer in cache.every_layer() if isinstance(layer, CrossLayer)]
    if not layers:
        if source is not None:
            raise InputError(f"source={source}: {type(model).__name__} reads no source, only encoder–decoder models do")
        return 0
    if not hasattr(model, "trace_source"):
        raise InputError(f"the encoder of {type(model).__name__} cannot be exported: it is no pure tensor program")
    positions = model.max_source_positions or 512 if source is None else check_int("source", source)
    if positions < 1 or (model.max_source_positions is not None and positions > model.max_source_positions):
        raise InputError(f"source={positions}: the encoder has 1 to {model.max_source_positions} positions")
    for layer in layers:
        layer.widen(positions)
    return positions


def fold_once(model: Model, cache: Cache) -> None:
    """One eager pass, after which recurrent layers know the constants that rewinding needs; then empties the cache."""
    if any(isinstance(layer, RecurrentLayer) for layer in cache.every_layer()):
        feed(model, cache, torch.zeros(cache.rows, 1, dtype=torch.int64, device=model.device), logits=None)
        cache.reset()
        for layer in cache.every_layer():
            for tensor in layer.data.values():
                tensor.zero_()


def weights_of(programs: dict[str, ExportedProgram], cache: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that a program reads beside its inputs and the cache."""
    found: dict[str, Tensor] = {}
    for program in programs.values():
        for spec in program.graph_signature.input_specs:
            target = spec.target
            if spec.kind == InputKind.USER_INPUT or target is None or target in cache:
                continue
            found[target] = program.state_dict[target] if target in program.state_dict else program.constants[target]
    return found


def describe(
    model: Model,
    cache: Cache,
    capacity: int,
    programs: dict[str, ExportedProgram],
    weights: dict[str, Tensor],
    chunk: int,
    positions: int,
) -> Manifest:
    layers = cache.every_layer()
    limits = [] if model.max_positions is None else [model.max_positions]
    limits += [min(layer.limit, capacity) for layer in layers if layer.limit is not None]
    layouts = {layer.layout for layer in layers if layer.layout is not None and layer.layout.ring is not None}
    rings = sorted([layout.ring or 0, layout.keep] for layout in layouts)
    if any(goes_back_by_slack(layer) for layer in layers):
        rings.insert(0, [0, 0])  # as a ring that has wrapped
    source = None
    if positions:
        example: Tensor = model.source_example(1, positions)  # type: ignore[operator]
        kind = "features" if example.is_floating_point() else "ids"
        vocab = 0 if kind == "features" else getattr(model, "source_vocab", None) or model.vocab
        shape = list(example.shape[1:-1])
        source = {"kind": kind, "capacity": positions, "most": example.shape[-1], "shape": shape, "vocab": vocab}
    return Manifest(
        target="pt2", family=type(model).__name__, fingerprint=Fingerprint.of(model).as_values(),
        rows=cache.rows, capacity=capacity, limit=min(limits, default=None), slack=cache.slack, chunk=chunk,
        vocab=model.vocab, dtype=NAMES[model.dtype], device=model.device.type,
        codec=", ".join(sorted({str(codec) for codec in cache.codecs})),
        cache={name: shape_and_dtype(tensor) for name, tensor in cache_tensors(cache).items()},
        weights=lay_out(weights), programs={name: signature(program, chunk) for name, program in programs.items()},
        rings=rings,
        states=any(isinstance(layer, RecurrentLayer) for layer in layers), source=source,
        start_ids=list(model.start_ids), eos_ids=list(model.eos_ids),
        tokenizer=None if model.tokenizer is None else tokenizer_facts(model.tokenizer),
        versions={"lamina": lamina.__version__, "torch": torch.__version__},
    )  # fmt: skip


def goes_back_by_slack(layer: Layer) -> bool:
    """True for kinds from outside the package that limit how far a row can be rewound. How they do is their own code,
    which a program does not have: they are taken to go back by the slack alone."""
    limits = type(layer).rewindable is not Layer.rewindable
    return limits and layer.layout is None and not isinstance(layer, RecurrentLayer)


def signature(program: ExportedProgram, chunk: int) -> dict[str, Any]:
    """The inputs and outputs of a program; a size that varies is [least, most]."""
    ranges = {
        str(symbol): [int(bounds.lower), int(bounds.upper)] for symbol, bounds in program.range_constraints.items()
    }

    def described(names: list[str]) -> dict[str, Any]:
        nodes = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
        return {
            name: {
                "shape": [n if isinstance(n, int) else ranges[str(n.node.expr)] for n in nodes[name].shape],
                "dtype": NAMES[nodes[name].dtype],
            }
            for name in names
        }

    outputs = described([str(name) for name in program.graph_signature.user_outputs])
    return {"inputs": described([str(name) for name in program.graph_signature.user_inputs]),
            "outputs": list(outputs.values())}  # fmt: skip
