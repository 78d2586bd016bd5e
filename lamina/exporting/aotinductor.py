"""The target "aotinductor": each program compiled to a shared library, for Python or C++ (cpp/program.h).

The libraries hold neither weights nor cache: the host allocates both, once for all programs, and hands them over as
constants that it manages itself. Programs write the cache in place. The archive is a folder, since libraries are loaded
from files; tensors.txt says what manifest.json says about tensors, one per line, for hosts without a JSON reader.
"""

from __future__ import annotations

import os
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lamina.errors import ProgramError
from lamina.exporting.archive import Writer, new_folder
from lamina.exporting.export import Exported
from lamina.exporting.manifest import VERSION, Manifest, as_words, shape_and_dtype

# Inductor writes the values of small buffers into the code, as they are while it compiles. The cache is empty then, so
# its tensors, such as the clock, must be neither inlined (keep) nor, where they have one element, folded (folding).
OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


def compile_to(exported: Exported, path: str | os.PathLike[str], **options: Any) -> None:
    """Compiles every program and writes a folder. `options` are those of torch._inductor (`inductor_configs`).

    >>> compile_to(lamina.export(model, rows=1, capacity=1024), "model.aoti")      # doctest: +SKIP
    """
    with new_folder(path) as folder:
        compiled = replace(exported, manifest=replace(exported.manifest, target="aotinductor"))
        writer = Writer(folder)
        (folder / "programs").mkdir()
        for name, program in exported.programs.items():
            package = folder / "programs" / f"{name}.pt2"
            configs = OPTIONS | options | {"aot_inductor.metadata": tensors_read(program, exported)}
            torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=configs)
            check_libraries(package)
            check_constants(name, program, package, exported)
            writer.add_file(f"programs/{name}.pt2")
        compiled.write(writer, programs=False, manifest=False)
        writer.write("tensors.txt", tensor_lines(compiled.manifest, writer.files))
        compiled.write_manifest(writer)


def tensors_read(program: ExportedProgram, exported: Exported) -> dict[str, str]:
    """dtype and shape by name of each weight and tensor of the cache that a program reads. The library keeps this
    table for its host to compare with the manifest, since it uses whatever memory it is given."""
    held = exported.cache | exported.weights
    names = [spec.target for spec in program.graph_signature.input_specs if spec.target in held]
    return {name: as_words(shape_and_dtype(held[name])) for name in names}


def check_libraries(package: Path) -> None:
    """The library must use the C++ library that PyTorch uses: with one of its own, loading it crashes the process."""
    with zipfile.ZipFile(package) as archive:
        libraries = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    for name, binary in libraries.items():
        if sys.platform == "linux" and b"libstdc++.so" not in binary and b"libc++.so" not in binary:
            raise ProgramError(
                f"{os.path.basename(name)} has a C++ library of its own, with which PyTorch would crash: the compiler "
                f"{os.environ.get('CXX', 'g++')} links libstdc++ statically. Set the environment variable CXX to one "
                f"that does not, often /usr/bin/g++, and TORCHINDUCTOR_CACHE_DIR to a new folder"
            )


def check_constants(name: str, program: ExportedProgram, package: Path, exported: Exported) -> None:
    """The library must take every tensor of the cache that the program reads, and nothing that the archive lacks."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    read = {spec.target for spec in program.graph_signature.input_specs if placeholders[spec.arg.name].users}
    taken = set(torch._inductor.aoti_load_package(str(package)).get_constant_fqns())
    lost = (read & set(exported.cache)) - taken
    made = taken - set(exported.cache) - set(exported.weights)
    if lost or made:
        raise ProgramError(f"AOTInductor compiled {name} without {sorted(lost)} of the cache, or made {sorted(made)}")


def tensor_lines(manifest: Manifest, files: Mapping[str, Mapping[str, int]]) -> str:
    """tensors.txt: the version, sizes, files that C++ reads, weights in weights.bin, tensors of the cache, programs.
    The last line has a CRC-32 of all lines before it."""
    m = manifest
    sizes = {"format": VERSION, "rows": m.rows, "chunk": m.chunk, "limit": m.limit or 0, "slack": m.slack}
    sizes |= {"vocab": m.vocab, "states": int(m.states), "source": 0 if m.source is None else m.source["most"]}
    slots = m.programs["decode"]["inputs"].get("slots")
    sizes["slots"] = 0 if slots is None else slots["shape"][0][0]
    if m.source is not None:
        width = next(iter(m.programs["encode"]["inputs"].values()))["shape"][-1]
        sizes |= {"source_vocab": m.source["vocab"], "source_least": width if isinstance(width, int) else width[0]}
    lines = [f"{name} {size}" for name, size in sizes.items()]
    if m.source is not None and m.source["kind"] == "features":
        lines.append(f"features {m.dtype} {' '.join(map(str, m.source['shape']))}")
    lines += [f"device {m.device}", *(f"ring {slots} {keep}" for slots, keep in m.rings)]
    lines += [f"{name} {' '.join(map(str, ids))}" for name, ids in (("eos", m.eos_ids), ("start", m.start_ids)) if ids]
    for name, facts in files.items():
        if name == "weights.bin" or name.startswith("programs/"):
            lines.append(f"file {name} {facts['bytes']} {facts['crc32']:08x}")
    for name, entry in m.weights.items():
        held = m.weights[entry.get("same", name)]
        lines.append(f"weight {name} {held['dtype']} {held['offset']} {' '.join(map(str, held['shape']))}")
    for name, entry in m.cache.items():
        lines.append(f"cache {name} {entry['dtype']} 0 {' '.join(map(str, entry['shape']))}")
    lines += [f"program {name}" for name in m.programs]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return f"{text}checksum {zlib.crc32(text.encode()):08x}\n"
