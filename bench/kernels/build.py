"""Builds the kernels of every family for every card, without a GPU, and compares: `python -m bench.kernels.build`

    --arch 86 --arch 120       for these cards (all)
    --shape llama-3.1-8b       of these models (all)
    --kernel tiles_kernel      these kernels (all)
    --registers                to the end, which tells registers, spills and how many have wgmma instructions that wait
                               for each other too, and takes about ten times as long
    --jobs 2                   this many processes (one for each core)

All of it is some 6,400 kernels, which take hours of one core. Prints a line for each kernel and model: the most shared
memory that any of its launches asks for, by card, in KiB. Exits with an error where a kernel asks for more than a block
may have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing is loaded, also where something could be

import torch

from bench.kernels.offline import Kernel, Key, Taken, built, collect, collect_others, limit_of, shared_bytes
from lamina.cache.spec import Recurrent
from lamina.checkpoint.shapes import SHAPES
from lamina.kernels.limits import CARDS, KIB
from lamina.loading import on_meta

# Families that have no shape to be timed with, in the sizes of a real model.
OTHERS: dict[str, dict[str, Any]] = {
    "rwkv-4-7b": dict(
        model_type="rwkv", vocab_size=50277, hidden_size=4096, num_hidden_layers=32, attention_hidden_size=4096,
        intermediate_size=16384, layer_norm_epsilon=1e-5, rescale_every=6, tie_word_embeddings=False,
    ),
    "lfm2-1.2b": dict(
        model_type="lfm2", vocab_size=65536, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=12288, block_auto_adjust_ff_dim=True, block_ffn_dim_multiplier=1.0,
        block_multiple_of=256, conv_L_cache=3, conv_bias=False, norm_eps=1e-5, max_position_embeddings=128000,
        tie_word_embeddings=True, layer_types=["conv", "full_attention"] * 8,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
    ),
    "llama-4-scout": dict(
        model_type="llama4_text", vocab_size=202048, hidden_size=5120, num_hidden_layers=48, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, intermediate_size=8192, intermediate_size_mlp=16384,
        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192,
        floor_scale=8192, attn_scale=0.1, attn_temperature_tuning=True, use_qk_norm=True, rms_norm_eps=1e-5,
        hidden_act="silu", max_position_embeddings=262144, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    ),
    "deepseek-v3.2": dict(
        model_type="deepseek_v32", vocab_size=129280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, intermediate_size=18432, moe_intermediate_size=2048, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, n_group=8, topk_group=4, routed_scaling_factor=2.5,
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=3, index_n_heads=64, index_head_dim=128, index_topk=2048, rms_norm_eps=1e-6,
        max_position_embeddings=163840, tie_word_embeddings=False,
    ),
    "flan-t5-xl": dict(
        model_type="t5", vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_decoder_layers=24,
        num_heads=32, relative_attention_num_buckets=32, relative_attention_max_distance=128, layer_norm_epsilon=1e-6,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    ),
}  # fmt: skip
LAYERS = 4  # of a model: those after them are like them
CODECS = ("int8", "int4", "k8v4", "fp8")
PAGE = 64

# Rows of a step, tokens of a captured pass, codecs, pages and slack.
USES: list[dict[str, Any]] = [
    *(dict(rows=rows) for rows in (1, 8, 32)),
    *(dict(rows=1, tokens=tokens) for tokens in (1, 2, 4, 8, 16)),
    *(dict(rows=8, tokens=tokens) for tokens in (2, 8)),
    dict(rows=32, tokens=2),
    *(dict(rows=rows, codec=codec) for codec in CODECS for rows in (1, 8, 32)),
    *(dict(rows=1, tokens=4, codec=codec) for codec in CODECS),
    *(dict(rows=rows, page=PAGE) for rows in (1, 8, 32)),
    dict(rows=1, tokens=4, page=PAGE),
    *(dict(rows=8, codec=codec, page=PAGE) for codec in CODECS),
    dict(rows=1, page=16),
    *(dict(rows=rows, weights=kind) for kind in ("int4", "int8", "fp8") for rows in (1, 8, 32)),
    *(dict(rows=rows, slack=4) for rows in (1, 8, 32)),
    *(dict(rows=8, tokens=tokens, slack=4) for tokens in (2, 8)),
]
# In float32, too.
EXACT: list[dict[str, Any]] = [
    dict(rows=1),
    dict(rows=8),
    dict(rows=32),
    dict(rows=1, tokens=4),
    dict(rows=1, codec="int8"),
    dict(rows=1, slack=4),
]


def config_of(name: str) -> dict[str, Any]:
    """Of the first layers of a model, which are of every kind that it has."""
    config = dict(OTHERS[name] if name in OTHERS else SHAPES[name].config)
    named = [name for name in ("num_layers", "num_decoder_layers") if name in config] or ["num_hidden_layers"]
    config.update(dict.fromkeys(named, LAYERS))
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    return config


def kernels_of(cards: Iterable[int], names: Iterable[str]) -> dict[Key, Kernel]:
    """The different kernels that these models launch on these cards, in all their uses."""
    found: dict[Key, Kernel] = {}
    for card in cards:
        for dtype in (torch.bfloat16, torch.float32):
            collect_others(found, card, dtype)
        for name in names:
            config = config_of(name)
            specs = [spec for entry in on_meta(config, torch.bfloat16).specs for spec in entry.values()]
            has_codecs = any(spec.takes_codec for spec in specs)
            has_states = any(isinstance(spec, Recurrent) for spec in specs)
            for dtype, uses in ((torch.bfloat16, USES), (torch.float32, EXACT)):
                for how in uses:
                    if (has_codecs or "codec" not in how) and (has_states or "slack" not in how):
                        collect(found, card, name, config, dtype, **how)
    return found


def take_all(kernels: list[Kernel], whole: bool, jobs: int) -> Iterator[tuple[Kernel, Taken]]:
    """What each kernel takes, built by `jobs` processes."""
    global _kernels
    _kernels = kernels  # before processes are forked: kernels cannot be sent to them
    # The slowest first, so that processes end together.
    order = sorted(range(len(kernels)), key=lambda i: not kernels[i].name.startswith("_attend"))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for i, taken in zip(order, pool.map(_take, order, [whole] * len(order), chunksize=4), strict=True):
            yield kernels[i], taken


_kernels: list[Kernel] = []


def _take(i: int, whole: bool) -> Taken:
    return built(_kernels[i]) if whole else Taken(shared_bytes(_kernels[i]))


def table(taken: Mapping[tuple[str, str, int], list[Taken]], cards: list[int]) -> Iterator[str]:
    """A line for each kernel and model, a column for each card."""
    yield f"| kernel | shape | {' | '.join(f'sm_{card}' for card in cards)} |"
    yield f"|---|---|{'---|' * len(cards)}"
    yield f"| limit, KiB | | {' | '.join(f'{limit_of(card) / KIB:.0f}' for card in cards)} |"
    for name, shape in sorted({key[:2] for key in taken}):
        cells = [_cell(taken.get((name, shape, card), []), card) for card in cards]
        yield f"| {name} | {shape} | {' | '.join(cells)} |"


def _cell(some: list[Taken], card: int) -> str:
    if not some:
        return ""
    shared = max(one.shared for one in some)
    text = f"{shared / KIB:.1f}{' !' if shared > limit_of(card) else ''}"
    if all(one.registers is None for one in some):
        return text
    registers, spilled = (max(getattr(one, name) or 0 for one in some) for name in ("registers", "spilled"))
    waiting = sum(one.waits for one in some)
    notes = (f"{registers} registers", f"{spilled} B spilled" * bool(spilled), f"{waiting} wait" * bool(waiting))
    return ", ".join([text, *filter(None, notes)])


def main(cards: list[int], names: list[str], only: list[str], whole: bool, jobs: int) -> int:
    """How many kernels ask for too much. `only`: those of these names; all where there are none."""
    began = time.time()
    kernels = [kernel for kernel in kernels_of(cards, names).values() if not only or kernel.name in only]
    print(f"{len(kernels)} kernels for {len(cards)} cards, found in {time.time() - began:.0f} s", flush=True)
    taken: dict[tuple[str, str, int], list[Taken]] = {}
    excess: list[str] = []
    for done, (kernel, one) in enumerate(take_all(kernels, whole, jobs), 1):
        if done % 200 == 0:
            print(f"{done} of {len(kernels)} after {time.time() - began:.0f} s", file=sys.stderr, flush=True)
        for shape in dict.fromkeys(use.split()[0] for use in kernel.uses):
            taken.setdefault((kernel.name, shape, kernel.card), []).append(one)
        if one.shared > limit_of(kernel.card):
            needs = f"{one.shared} bytes of shared memory, {limit_of(kernel.card)} are there"
            excess.append(f"sm_{kernel.card} {kernel.name}: {needs}: {'; '.join(kernel.uses[:3])}")
    print("\n".join(table(taken, cards)))
    print(f"\n{len(kernels)} kernels in {time.time() - began:.0f} s; {len(excess)} ask for too much", *excess, sep="\n")
    return len(excess)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, action="append", choices=list(CARDS), help="a card: 86 for sm_86")
    parser.add_argument("--shape", action="append", choices=[*SHAPES, *OTHERS], help="a model")
    parser.add_argument("--kernel", action="append", default=[], help="a kernel")
    parser.add_argument("--registers", action="store_true", help="build to the end")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    cards, names = asked.arch or list(CARDS), asked.shape or [*SHAPES, *OTHERS]
    sys.exit(main(cards, names, asked.kernel, asked.registers, asked.jobs) > 0)
