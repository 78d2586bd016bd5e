"""Kernels built without a GPU: those that a model launches on some card, and what each of them takes of it.

A step is run over a model without weights (on the meta device), as if the card were there. Triton tells of every kernel
that it would build (`jit_cache_hook`), and each different one is kept. Shared memory is known once Triton has
allocated it, long before ptxas runs: that takes a tenth of the time of a whole build, which also gives registers.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import torch
import triton
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver

from lamina.kernels.limits import CARDS, assumed
from lamina.recurrence import Rule

Key = tuple[int, str, str]


@dataclass
class Kernel:
    """A kernel as one card would be given it: its function, the types and constants it is built for, and its options.

    uses   where it is launched, in words
    """

    card: int
    name: str
    fn: Any
    given: Mapping[str, Any]
    uses: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        kept = json.loads(self.given["specialization_data"])["options"]
        del kept["extern_libs"]  # paths of this machine, which the backend finds by itself
        return {name: tuple(one) if isinstance(one, list) else one for name, one in kept.items()}

    @property
    def source(self) -> ASTSource:
        return ASTSource(self.fn, self.given["signature"], self.given["constants"], self.given["configs"][0])

    @property
    def constants(self) -> dict[str, Any]:
        """The numbers that it is built for, by their names."""
        names = [parameter.name for parameter in self.fn.params]
        return {names[path[0]]: value for path, value in self.given["constants"].items()}


@dataclass(frozen=True)
class Taken:
    """What a kernel takes: bytes of shared memory, and after a whole build registers and bytes of spills a thread.

    waits   whether ptxas made each wgmma instruction wait for the one before
    """

    shared: int
    registers: int | None = None
    spilled: int | None = None
    waits: bool = False


class Absent:
    """Stands for the driver of a card that is not there."""

    def __init__(self, card: int) -> None:
        self.card = card

    def get_current_target(self) -> GPUTarget:
        return target_of(self.card)

    def get_current_device(self) -> int:
        return self.card  # by which Triton tells apart what it has built

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def target_of(card: int) -> GPUTarget:
    return GPUTarget("cuda", card, 32)


@contextmanager
def instead_of_a_gpu(card: int) -> Iterator[None]:
    """Inside, kernels are chosen and built for the card `sm_<card>`."""
    before = driver._active
    driver.set_active(Absent(card))
    try:
        with assumed(CARDS[card]):
            yield
    finally:
        driver._active = before


@contextmanager
def collected(found: dict[Key, Kernel], card: int, use: str) -> Iterator[None]:
    """Inside, kernels that would be built for the card are put into `found` and not built."""

    def keep(*, key: str, fn: Any, compile: Mapping[str, Any], **rest: Any) -> bool:
        kernel = found.setdefault((card, fn.name, key), Kernel(card, fn.name, fn.jit_function, compile))
        if use not in kernel.uses:
            kernel.uses.append(use)
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = keep
    try:
        with instead_of_a_gpu(card):
            yield
    finally:
        knobs.runtime.jit_cache_hook = before


def collect(
    found: dict[Key, Kernel], card: int, name: str, config: Mapping[str, Any], dtype: torch.dtype, **how: Any
) -> None:
    """Puts the kernels of a decode step, or of a pass, of a model of this configuration into `found`.

    how   rows, tokens, codec, page and slack, as `build_kernels` takes them; weights, as `lamina.load` does
    """
    from lamina.loading import stored_on_meta
    from lamina.runtime.prebuild import build_kernels

    words = [name, str(dtype).removeprefix("torch."), *(f"{key}={value}" for key, value in how.items())]
    with collected(found, card, " ".join(words)):
        build_kernels(stored_on_meta(config, dtype, None, how.pop("weights", "plain")), **how)


def collect_others(found: dict[Key, Kernel], card: int, dtype: torch.dtype) -> None:
    """Puts kernels of `lamina.nn` into `found` that no model of `build` launches: a layer norm, an MLP without a gate,
    ALiBi, a layer that reads another layer's keys and values, and those of prompts."""
    from lamina.activation import Gating
    from lamina.attention.view import View
    from lamina.attention.window import Full, Near, Sliding
    from lamina.kernels.attention.decode import decode_attention
    from lamina.kernels.attention.decode_fused import attend_stored, attend_token
    from lamina.kernels.attention.merge import merge_into
    from lamina.kernels.attention.prefill.few import attend_few, few_tile
    from lamina.kernels.attention.prefill.many import attend_many, tile_for
    from lamina.kernels.columns import WIDTH
    from lamina.kernels.elementwise import expert_sum, gated, rotate_heads, scale_columns
    from lamina.kernels.gemm.product import product
    from lamina.kernels.limits import limits_of
    from lamina.kernels.norm import gated_rms_norm, layer_norm
    from lamina.kernels.packed.dequantize import dequantize
    from lamina.kernels.packed.experts import packed_expert_down, packed_expert_gated
    from lamina.kernels.packed.matrix import PackedMatrix
    from lamina.kernels.packed.product import packed_product
    from lamina.kernels.recurrent.prompt.conv import conv_prompt
    from lamina.kernels.recurrent.prompt.gated_delta import gated_delta_prompt
    from lamina.kernels.recurrent.prompt.selective_scan import selective_scan_prompt
    from lamina.kernels.recurrent.prompt.ssd import ssd_prompt
    from lamina.nn import AlibiBias, RelativeBias, alibi_slopes
    from lamina.recurrence import SSD, GatedDelta, SelectiveScan
    from lamina.runtime.builders import build_together

    def program() -> None:
        x, weight = torch.empty(2, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
        codes, exponents = (torch.empty(4096, width, dtype=torch.uint8) for width in (2048, 128))
        mxfp4 = PackedMatrix("mxfp4", codes, exponents, 32)
        layer_norm(x, weight, weight, 1e-5)
        layer_norm(x, weight, None, 1e-5, residual=x)
        product(x[:1], torch.empty(16384, 4096, dtype=dtype), bias=torch.empty(16384, dtype=dtype), act="gelu_new")
        gated(torch.empty(4096, 28672, dtype=dtype), Gating("silu"))
        scale_columns(torch.empty(64, 4096, dtype=dtype), torch.empty(4096))
        heads = torch.empty(8192, 128, dtype=dtype)
        gated_rms_norm(heads, heads, torch.empty(128), 1e-6)
        pairs = torch.empty(64, 8, dtype=torch.int64)
        expert_sum(torch.empty(64, 2048, dtype=dtype), torch.empty(512, 2048, dtype=dtype), pairs, torch.empty(64, 8))
        for many in (x[:1], x):
            packed_product(many, mxfp4)
        h = packed_expert_gated(x[:1], mxfp4, pairs[:1], torch.empty(1, 8), Gating("silu"), experts=2)
        narrow = PackedMatrix("mxfp4", codes[:, :512].contiguous(), exponents[:, :32].contiguous(), 32)
        packed_expert_down(h, narrow, pairs[:1], torch.empty(1, 8), experts=2)
        dequantize(mxfp4, torch.empty(4096, 4096, dtype=dtype))
        angles = torch.empty(1, 64, 64)
        rotate_heads(torch.empty(1, 32, 64, 128, dtype=dtype), (angles, angles))
        merge_into(torch.empty(64, 128), torch.empty(64), torch.empty(64, 128, dtype=dtype), torch.empty(64))
        table, bias = torch.empty(WIDTH, dtype=torch.int64), AlibiBias(alibi_slopes(32)).kernel_form()
        for dim in (64, 80, 96, 112, 128, 192, 256):
            q, k = (torch.empty(2, heads, 1, dim, dtype=dtype) for heads in (32, 8))
            for window in (Full(), Sliding(512)):
                attend_token(q, k, k, None, table, window, scale=1.0, bias=bias)
                attend_stored(q, table, 8, dim, window, new=True, scale=1.0)
            new = torch.empty(2, 8, 4, dim, dtype=dtype)
            decode_attention(new, new, new, table, Full(), scale=1.0, bias=bias)
            at = torch.empty(1, 2048, dtype=torch.int64)
            for tokens in (512, 2048):
                q, k = (torch.empty(1, heads, tokens, dim, dtype=dtype) for heads in (32, 8))
                attend_many(q, k, k, View(at[:, :tokens], at[:, :tokens], Sliding(512)), scale=1.0, softcap=30.0)
            both = View(at, at, Near(512), causal=False)
            relative, sums = RelativeBias(32, 32, 128, both_ways=True).kernel_form(), torch.empty(1, 2048, 32)
            attend_many(q, k, k, both, scale=1.0, bias=relative, log_sums=sums)
            ruled = View(at, at, Full(), also=lambda row, q, kv: q != kv)
            tile = tile_for(2048, dim, dim, q.element_size(), limits_of(q.device), bits=True)
            attend_many(q, k, k, ruled, scale=1.0, tile=tile, mask=ruled.mask_bits(tile.queries, tile.block))
            for tokens in (2, 16):
                some = View(at[:, :tokens], at, Sliding(512))
                attend_few(q[:, :, :tokens], k, k, some, scale=1.0, softcap=30.0, bias=bias)
                few_ruled = ruled.part(slice(tokens))
                tile = few_tile(4 * tokens, dim, dim, q.element_size(), limits_of(q.device))
                bits = few_ruled.mask_bits(tile.queries, tile.block)
                attend_few(q[:, :, :tokens], k, k, few_ruled, scale=1.0, sinks=torch.empty(32), mask=bits)
        collect_prompts(dtype, table)
        collect_slack(dtype)
        for rule in (SSD(80, 64, 128, groups=1), SSD(24, 128, 256, groups=1), SSD(128, 64, 128, groups=8)):
            for tokens in (512, 8192):
                counts, constants = torch.empty(1, dtype=torch.int64), {"A": torch.empty(rule.heads)}
                inputs = {
                    name: torch.empty(1, tokens, *shape, dtype=dtype) for name, shape in rule.input_shapes.items()
                }
                ssd_prompt(rule, rule.zero_state(1), inputs, constants, counts)
                past, x, taps = (torch.empty(*shape, 5376, dtype=dtype) for shape in ((1, 3), (1, tokens), (4,)))
                conv_prompt(past, x, taps.t().contiguous(), taps[0], "silu", counts)
        delta, scan = GatedDelta(16, 32, 128, 128), SelectiveScan(5120, 16)
        for rows, tokens in ((1, 8192), (64, 1024)):
            counts = torch.empty(rows, dtype=torch.int64)
            state, inputs = delta.zero_state(rows), inputs_of(delta, rows, tokens, dtype)
            gated_delta_prompt(delta, state, inputs, {}, counts)
            state, inputs = scan.zero_state(rows), inputs_of(scan, rows, tokens, dtype)
            selective_scan_prompt(scan, state, inputs, {"A": torch.empty(5120, 16)}, counts)

    with collected(found, card, f"others {str(dtype).removeprefix('torch.')}"), torch.device("meta"):
        build_together(program)


def inputs_of(rule: Rule, rows: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    kinds = {name: torch.float32 if name in rule.exact else dtype for name in rule.input_shapes}
    return {n: torch.empty(rows, tokens, *shape, dtype=kinds[n]) for n, shape in rule.input_shapes.items()}


def collect_prompts(dtype: torch.dtype, table: torch.Tensor) -> None:
    """Launches the kernels of captured prompts that find a cache through its table."""
    from lamina.attention.window import Full, Sliding
    from lamina.kernels.attention.indexer import Marks, select_in_turns
    from lamina.kernels.attention.prompt.attend import attend_prompt
    from lamina.kernels.attention.prompt.latent import attend_latents
    from lamina.kernels.attention.prompt.selected import attend_selected
    from lamina.kernels.attention.prompt.store import store_tokens
    from lamina.kernels.attention.recall import recall_part
    from lamina.kernels.recurrent.prompt.carried import load_inputs, load_state, store_state
    from lamina.nn import AlibiBias, alibi_slopes

    bias = AlibiBias(alibi_slopes(32)).kernel_form()
    for dim in (64, 80, 128, 192, 256):
        for tokens, page in ((32, 0), (512, 0), (64, 64)):
            q, k = (torch.empty(1, heads, tokens, dim, dtype=dtype) for heads in (32, 8))
            attend_prompt(q, (k, k), table, 8, dim, Full(), scale=1.0, page=page)
            attend_prompt(q, (k, k), table, 8, dim, Sliding(4096), scale=1.0, softcap=50.0, page=page)
            attend_prompt(q, (k, k), table, 8, dim, Full(), scale=1.0, bias=bias, page=page)
            attend_prompt(q, None, table, 8, dim, scale=1.0)
            store_tokens(k, k, table, page)
    for tokens in (32, 512):
        latents = torch.empty(1, 1, tokens, 576, dtype=dtype)
        attend_latents(torch.empty(1, 16, tokens, 576, dtype=dtype), latents[:, 0], table, rank=512, scale=1.0)
        keys, weights = torch.empty(1, tokens, 128, dtype=dtype), torch.empty(1, tokens, 64)
        scored = torch.empty(1, 64, tokens, 128, dtype=dtype), weights, keys, table, 2048, 64
        first, stop, spans = torch.empty(3, 1, tokens, dtype=torch.int32)
        for marks in (Marks(first, stop, None), Marks(first, stop, spans)):
            select_in_turns(*scored, marks=marks)
        chosen = select_in_turns(*scored)
        for heads, page in ((128, 0), (16, 0), (128, 64)):
            q = torch.empty(1, heads, tokens, 576, dtype=dtype)
            attend_selected(q, latents[:, 0], table, chosen, rank=512, scale=1.0, page=page)
        attend_selected(q, latents[:, 0], table, chosen, rank=512, scale=1.0, marks=Marks(first, stop, None))
        store_tokens(latents, None, table)
        load_inputs(table, torch.empty(1, tokens, 5376, dtype=dtype), 4)
    store_state(load_state(table, 1, (80, 64, 128)), table)
    for kind, page in ((dtype, 0), (torch.uint8, 64)):
        for window in (Full(), Sliding(512)):
            recall_part(table, "k", 1, 512, 128, kind, window, page)


def collect_slack(dtype: torch.dtype) -> None:
    """Launches the kernels that keep what caches with slack are rewound from."""
    from lamina.kernels.columns import WIDTH
    from lamina.kernels.recurrent.input_log import log_inputs, logged_inputs
    from lamina.kernels.recurrent.prompt.carried import store_base
    from lamina.kernels.recurrent.recur import recur_step
    from lamina.kernels.recurrent.rewind import move_base, tokens_to_base
    from lamina.recurrence import RGLRU, SSD, WKV, ChannelDelta, GatedDelta, SelectiveScan
    from lamina.recurrence.rg_lru import Gates

    table, counts = torch.empty(WIDTH, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
    store_base(torch.empty(1, 80, 64, 128), table, counts)
    rules = (
        SSD(80, 64, 128, groups=1), SelectiveScan(5120, 16), GatedDelta(16, 32, 128, 128), ChannelDelta(32, 128, 128),
        RGLRU(2560), WKV(4096),
    )  # fmt: skip
    constants = dict(A=torch.empty(5120, 16), w=torch.empty(4096), first=torch.empty(4096))
    weights = torch.empty(2560, 256, dtype=dtype), torch.empty(2560, dtype=dtype)
    around: list[dict[str, Any]] = [
        dict(dt_bias=torch.empty(80), dt_limit=(0.001, 0.1)),
        dict(dt_bias=torch.empty(5120), norms=(1e-5, None, None)),
        dict(unit=True, gates=(torch.empty(32), torch.empty(32)), doubled=True),
        dict(unit=True, gates=(torch.empty(32), torch.empty(32, 128))),
        dict(gates=Gates(*weights, *weights, torch.empty(2560)), positions=torch.empty(1, 1, dtype=torch.int64)),
        {},
    ]
    for rule, how in zip(rules, around, strict=True):
        inputs = inputs_of(rule, 1, 1, dtype)
        recur_step(rule, inputs, constants, table, **how, ready=logged_inputs(rule, inputs, how, dtype)[1])
        for rows, tokens in ((1, 32), (1, 512), (1, 1), (32, 1), (8, 4)):
            inputs = inputs_of(rule, rows, tokens, dtype)
            tokens_to_base(table, rows, tokens)
            move_base(rule, inputs, constants, table, skip=tokens > 16)
            log_inputs(inputs, table)


def shared_bytes(kernel: Kernel) -> int:
    """The shared memory that Triton allocates for a kernel, found without building it to the end."""
    target = target_of(kernel.card)
    backend = make_backend(target)
    options = backend.parse_options(kernel.options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = kernel.source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    module = backend.make_ttir(module, {}, options, kernel.card)
    module = backend.make_ttgir(module, {}, options, kernel.card)
    manager = ir.pass_manager(module.context)  # as `make_llir` begins
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, kernel.card, 86)
    manager.run(module, "allocate_shared_memory")
    return int(module.get_int_attr("ttg.shared"))


def built(kernel: Kernel) -> Taken:
    """Builds a kernel to the end and asks the binary what it takes."""
    binary = triton.compile(kernel.source, target=target_of(kernel.card), options=kernel.options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}
    return Taken(binary.metadata.shared, usage["REG"], usage["STACK"], _waits(binary.asm["ptx"], kernel.card))


def _waits(ptx: str, card: int) -> bool:
    if card != 90 or "wgmma" not in ptx:
        return False
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{card}a", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    return "wgmma.mma_async instructions are serialized" in said.stderr + said.stdout


@cache
def limit_of(card: int) -> int:
    return CARDS[card].shared
