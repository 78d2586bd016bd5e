"""Where loading a program of AOTInductor fails, stage by stage: `python -m bench.aotinductor_load all [--device cpu]`

A process that crashes while it loads a library says little. Here each variant (options of the compiler, other programs,
other ways of linking) is compiled in one process and loaded in another, stage by stage: the library alone, its
container, PyTorch's loader, constants, three steps against eager ones. A crash prints the C frames it happened in. The
table shows how far each variant came.

    all [--only "full;plain"] [--jobs 16] [--out FOLDER]     every variant; FOLDER keeps what each printed
    compile VARIANT FOLDER                                 one variant
    load FOLDER                                            what `compile` left there
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lamina.exporting.aotinductor import OPTIONS

OUTSIDE = {"aot_inductor.package_constants_in_so": False}
KEPT = {"always_keep_tensor_constants": True}
UNFOLDED = {"joint_graph_constant_folding": False}
SECONDS = {"compile": 90, "load": 60}
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """program: "decode" of a small Llama, or "plain": one layer and two buffers. here: loaded by the process that
    compiled it, which is what `compile_to` does."""

    program: str = "decode"
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    linker: str = ""
    here: bool = False
    fused_attention: bool = True
    device: str | None = None


VARIANTS = {
    "full": Variant(),
    "here": Variant(here=True),
    "constants inside": Variant(options=KEPT | UNFOLDED),
    "constants not kept": Variant(options=OUTSIDE | UNFOLDED),
    "folded": Variant(options=OUTSIDE | KEPT),
    "own symbols": Variant(linker="-Wl,-Bsymbolic"),
    "not optimized": Variant(options=OPTIONS | {"aot_inductor.compile_wrapper_opt_level": "O0"}),
    "kernels inside": Variant(options=OPTIONS | {"aot_inductor.embed_kernel_binary": True}),
    "no fused attention": Variant(fused_attention=False),
    "plain": Variant("plain", {}),
    "plain with our options": Variant("plain"),
    "plain, own symbols": Variant("plain", linker="-Wl,-Bsymbolic"),
    "plain, no libraries' symbols": Variant("plain", linker="-Wl,--exclude-libs,ALL"),
    "no libraries' symbols": Variant(linker="-Wl,--exclude-libs,ALL"),
    "cpu": Variant(device="cpu"),
}

# Prints the frames of a crash from a stack of its own, since the crashed one may be gone.
HANDLER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static char stack[1 << 18];
static void print(void* p) {
  char line[2000]; Dl_info i; memset(&i, 0, sizeof i);
  if (p && dladdr(p, &i) && i.dli_fname)
    snprintf(line, sizeof line, "FRAME %s+0x%lx %s\n", i.dli_fname, (long)((char*)p - (char*)i.dli_fbase),
             i.dli_sname ? i.dli_sname : "?");
  else snprintf(line, sizeof line, "FRAME %p in no module\n", p);
  if (write(1, line, strlen(line))) {}
}
static void crashed(int sig, siginfo_t* info, void* context) {
  char line[200]; void* frames[40];
  snprintf(line, sizeof line, "\nCRASH signal %d at address %p\n", sig, info->si_addr);
  if (write(1, line, strlen(line))) {}
  int n = backtrace(frames, 40);
  for (int i = 0; i < n; ++i) print(frames[i]);
  signal(sig, SIG_DFL); raise(sig);
}
void install(void) {
  void* warm[2]; backtrace(warm, 2);
  stack_t s; memset(&s, 0, sizeof s); s.ss_sp = stack; s.ss_size = sizeof stack; sigaltstack(&s, 0);
  struct sigaction a; memset(&a, 0, sizeof a); a.sa_sigaction = crashed; a.sa_flags = SA_SIGINFO | SA_ONSTACK;
  int all[] = {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE};
  for (int i = 0; i < 5; ++i) sigaction(all[i], &a, 0);
}
"""


def stage(text: str) -> None:
    print(f"STAGE {text}", flush=True)


def print_crashes() -> None:
    faulthandler.enable()
    folder = Path(tempfile.mkdtemp())
    (folder / "crash.c").write_text(HANDLER)
    built = folder / "crash.so"
    subprocess.run(["gcc", "-w", "-O1", "-shared", "-fPIC", folder / "crash.c", "-o", built, "-ldl"], check=True)
    ctypes.CDLL(str(built)).install()


# -- compiling -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A layer, and two buffers that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.total, self.count = nn.Buffer(torch.zeros(4, 64)), nn.Buffer(torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.total.copy_(self.total + y)
        self.count.add_(1)
        return y + self.total + self.count


@torch.no_grad()
def plain_program(device: str) -> tuple[ExportedProgram, dict[str, Any]]:
    model = Plain().to(device)
    inputs = [(torch.randn(4, 64, device=device),) for _ in range(3)]
    program = torch.export.export(model, inputs[0], strict=True)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return program, {"tensors": tensors, "inputs": inputs, "expected": [(model(*one),) for one in inputs]}


@torch.no_grad()
def decode_program(device: str) -> tuple[ExportedProgram, dict[str, Any]]:
    import lamina
    from lamina.bench.random_model import random_model

    model = random_model(CONFIG, torch.float32, torch.device(device))
    cache, inputs, expected = model.new_cache(1, capacity=64), [], []
    for i, token in enumerate((1, 5, 2)):
        ids = torch.tensor([[token]], device=device)
        logits = model(ids, cache=cache, logits="last")
        assert logits is not None
        slots = torch.zeros(max(2, i + 1), dtype=torch.int8, device=device)  # of which the shape counts
        inputs.append((ids, torch.ones(1, dtype=torch.int64, device=device), slots))
        expected.append((logits.argmax(-1), logits))
    made = lamina.export(model, 1, 64)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in made.cache.items()}
    tensors |= {name: tensor.detach() for name, tensor in made.weights.items()}
    return made.programs["decode"], {"tensors": tensors, "inputs": inputs, "expected": expected}


def compile_variant(name: str, folder: Path, device: str) -> None:
    variant = VARIANTS[name]
    device = variant.device or device
    if variant.linker:
        link_with(variant.linker, folder)
    if not variant.fused_attention:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    program, facts = (plain_program if variant.program == "plain" else decode_program)(device)
    stage("exported")
    devices = {str(node.meta["val"].device) for node in program.graph.nodes if hasattr(node.meta.get("val"), "device")}
    print(f"devices of values: {devices}, of tensors: { ({str(one.device) for one in facts['tensors'].values()}) }")
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "model.pt2"), inductor_configs=variant.options
    )
    torch.save(facts | {"device": device}, folder / "facts.pt")
    stage("compiled")
    if variant.here:
        load(folder)


def link_with(flags: str, folder: Path) -> None:
    """Makes the compiler one that links libraries with more flags."""
    wrapper = folder / "g++"
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) exec /usr/bin/g++ "$@" {flags};; esac\nexec /usr/bin/g++ "$@"\n'
    )
    wrapper.chmod(0o755)
    os.environ["CXX"] = str(wrapper)


# -- loading -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(folder: Path) -> None:
    facts = torch.load(folder / "facts.pt", map_location="cpu", weights_only=False)
    device, package = facts["device"], str(folder / "model.pt2")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(folder / "unpacked")
    library = next((folder / "unpacked").rglob("*.so"))
    nodes = library.with_suffix(".json")
    print(f"operations that PyTorch's loader calls by name: {nodes.read_text()[:2000] if nodes.exists() else 'none'}")
    if device != "cpu":
        torch.zeros(1, device=device)  # CUDA is initialised
    stage("the library alone")
    handle = ctypes.CDLL(str(library), mode=os.RTLD_NOW)
    stage("its container")
    container, count = ctypes.c_void_p(), ctypes.c_size_t()
    create = handle.AOTInductorModelContainerCreateWithDevice
    create.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p]
    create(ctypes.byref(container), 1, device.encode(), str(library.parent).encode())
    handle.AOTInductorModelContainerGetNumConstants(container, ctypes.byref(count))
    stage(f"PyTorch's loader, of a library with {count.value} constants")
    compiled = torch._inductor.aoti_load_package(package)
    names = compiled.get_constant_fqns()
    stage(f"{len(names)} constants")
    kept = {name: facts["tensors"][name].to(device) for name in names}
    compiled.load_constants(kept, check_full_update=True, user_managed=True)
    stage("steps")
    worst = 0.0
    for inputs, expected in zip(facts["inputs"], facts["expected"], strict=True):
        found = compiled(*(one.to(device) for one in inputs))
        pairs = zip(found if isinstance(found, list | tuple) else (found,), expected, strict=True)
        worst = max(worst, *(float((a.cpu().double() - b.cpu().double()).abs().max()) for a, b in pairs))
    stage(f"all done, {'equal' if worst < 2e-2 else 'DIFFERENT'}: {worst:.1e}")


# -- all variants --------------------------------------------------------------------------------------------------


def run_all(names: Sequence[str], device: str, jobs: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda name: run_one(name, device, out), names))
    print("| variant | came to | a crash in |\n|---|---|---|")
    for name, text in zip(names, found, strict=True):
        lines = text.splitlines()
        stages = [line.removeprefix("STAGE ") for line in lines if line.startswith("STAGE ")]
        frames = [line.removeprefix("FRAME ") for line in lines if line.startswith("FRAME ")]
        errors = [line for line in lines if "Error" in line]
        last = (stages or ["nothing"])[-1] + (f" ({errors[-1][:100]})" if errors else "")
        print(f"| {name} | {last} | {'; '.join(frames[2:5])} |", flush=True)


def run_one(name: str, device: str, out: Path) -> str:
    """Compiles and loads a variant; -> what both printed"""
    text = ""
    with tempfile.TemporaryDirectory() as folder:
        own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        words = [sys.executable, "-m", "bench.aotinductor_load"]
        for task in (["compile", name, folder, "--device", device], ["load", folder]):
            if task[0] == "load" and (VARIANTS[name].here or "STAGE compiled" not in text):
                break
            begun = time.perf_counter()
            try:
                done = subprocess.run(
                    [*words, *task], env=own, text=True, timeout=SECONDS[task[0]], stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
                text += f"{done.stdout}\n{task[0]}: exit code {done.returncode}, {time.perf_counter() - begun:.0f} s\n"
            except subprocess.TimeoutExpired as late:
                text += f"{(late.stdout or b'').decode()}\n{task[0]}: Error: not done after {SECONDS[task[0]]} s\n"
    (out / f"{name.replace(' ', '_')}.txt").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("all", "compile", "load"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=";".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "aotinductor_load")
    given = parser.parse_args()
    if given.task == "all":
        return run_all(given.only.split(";"), given.device, given.jobs, given.out)
    print_crashes()
    if given.task == "compile":
        compile_variant(given.rest[0], Path(given.rest[1]), given.device)
    else:
        load(Path(given.rest[0]))


if __name__ == "__main__":
    main()
