"""Time and memory that loading packed checkpoints takes on a CPU: `python -m bench.packed_load [LAYOUT …] [--gb N]`

Writes checkpoints of a llama with random packed weights (Q4_K and Q8_0 as GGUF files; AWQ, GPTQ, compressed-tensors and
FP8 as folders), each about N GB, one at a time, and loads each in a process of its own, twice: the table has the second
load, whose file is in the page cache. `lamina.load` is timed without imports.

    seconds, CPU     wall-clock time, and time of all cores
    weights          bytes of the model's weights, as they are stored in memory or on the memory map
    own memory       most anonymous memory that was held during the load: weights that were copied, and scratch
    RSS              most resident memory, with the pages of the file that were touched
    one tensor       bytes of the largest weight of the model
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

CONFIG = dict(
    model_type="llama", vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
    num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}  # fmt: skip
GROUP = 128


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape).add_(0.1).div_(1000).half()


def awq(out: int, width: int) -> dict[str, Tensor]:
    groups = width // GROUP
    return {".qweight": words(width, out // 8), ".qzeros": words(groups, out // 8), ".scales": scales(groups, out)}


def gptq(bits: int, ordered: bool = False) -> Callable[[int, int], dict[str, Tensor]]:
    def parts(out: int, width: int) -> dict[str, Tensor]:
        groups, index = width // GROUP, torch.arange(width) // GROUP
        return {
            ".qweight": words(width * bits // 32, out), ".qzeros": words(groups, out * bits // 32),
            ".scales": scales(groups, out), ".g_idx": (index[torch.randperm(width)] if ordered else index).int(),
        }  # fmt: skip

    return parts


def compressed(bits: int) -> Callable[[int, int], dict[str, Tensor]]:
    def parts(out: int, width: int) -> dict[str, Tensor]:
        found = {".weight_packed": words(out, width * bits // 32), ".weight_scale": scales(out, width // GROUP)}
        return found | {".weight_shape": torch.tensor([out, width])}

    return parts


def int_quantized(out: int, width: int) -> dict[str, Tensor]:
    return {".weight": words(out, width // 4).view(torch.int8), ".weight_scale": scales(out, 1)}


def float8(out: int, width: int) -> dict[str, Tensor]:
    codes = words(out, width // 4).view(torch.uint8) & 0x77
    return {".weight": codes.view(torch.float8_e4m3fn), ".weight_scale_inv": scales(out // 128, width // 128).float()}


TENSORS = {"quant_method": "compressed-tensors", "config_groups": {}}
FOLDERS: dict[str, tuple[dict[str, object], Callable[[int, int], dict[str, Tensor]]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "gptq-4": ({"quant_method": "gptq", "bits": 4}, gptq(4)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8}, gptq(8)),
    "gptq-4-act-order": ({"quant_method": "gptq", "bits": 4}, gptq(4, ordered=True)),
    "gptq-8-act-order": ({"quant_method": "gptq", "bits": 8}, gptq(8, ordered=True)),
    "pack-quantized-4": (TENSORS | {"format": "pack-quantized"}, compressed(4)),
    "pack-quantized-8": (TENSORS | {"format": "pack-quantized"}, compressed(8)),
    "int-quantized": (TENSORS | {"format": "int-quantized"}, int_quantized),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8),
}
GGUF = ("Q4_K", "Q8_0")
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def plain_tensors(layers: int) -> Iterator[tuple[str, Tensor]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", torch.randn(1024, 4096).div_(64).bfloat16()
    yield "model.norm.weight", torch.ones(4096).bfloat16()
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{name}.weight", torch.ones(4096).bfloat16()


def write_folder(folder: Path, layout: str, size: float) -> Path:
    from safetensors.torch import save_file

    settings, parts = FOLDERS[layout]
    each = sum(part.nbytes for shape in SHAPES.values() for part in parts(*shape).values())
    layers = max(round(size / each), 1)
    for i in range(layers):
        tensors = {
            f"model.layers.{i}.{name}{suffix}": part
            for name, shape in SHAPES.items()
            for suffix, part in parts(*shape).items()
        }
        save_file(tensors, folder / f"model-{i}.safetensors")
    save_file(dict(plain_tensors(layers)), folder / "model-plain.safetensors")
    config = CONFIG | {"num_hidden_layers": layers, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(folder: Path, kind: str, size: float) -> Path:
    import gguf
    import numpy as np

    group, block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    layers = max(round(size / sum(out * width // group * block for out, width in SHAPES.values())), 1)
    path = folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (
        ("block_count", layers), ("context_length", 4096), ("embedding_length", 4096), ("feed_forward_length", 14336),
        ("attention.head_count", 32), ("attention.head_count_kv", 8), ("rope.dimension_count", 128),
        ("vocab_size", 1024),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", np.random.randn(1024, 4096).astype("f2"))
    writer.add_tensor("output_norm.weight", np.ones(4096, "f4"))
    noise = np.random.default_rng(0)
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(4096, "f4"))
        for name, (out, width) in SHAPES.items():
            blocks = noise.integers(0, 60, (out, width // group * block), dtype=np.uint8)  # scales stay finite
            writer.add_tensor(f"blk.{i}.{NAMES[name]}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def measure(path: str) -> dict[str, float]:
    """Loads a checkpoint in this process, whose memory a thread samples meanwhile."""
    from lamina import load
    from lamina.weights import named_weights, weight_bytes

    before, most, done = (status("RssAnon"), status("VmRSS")), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            for i, field in enumerate(("RssAnon", "VmRSS")):
                most[i] = max(most[i], status(field) - before[i])

    thread = threading.Thread(target=watch)
    thread.start()
    start, cpu = time.perf_counter(), time.process_time()
    model = load(path, device="cpu")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    thread.join()
    largest = max(one.nbytes for _, one in named_weights(model))
    return dict(
        seconds=seconds, cpu=cpu, weights=weight_bytes(model), own=most[0], rss=most[1], largest=largest,
        packed=sum(one.nbytes for _, one in named_weights(model) if not isinstance(one, torch.nn.Parameter)),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"of {', '.join((*GGUF, *FOLDERS))}; all by default")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--measure", metavar="PATH", help="load this checkpoint alone, and print figures as JSON")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    head = (
        "checkpoint | weights, GB | seconds | CPU seconds | seconds per GB | own memory, GB | RSS, GB | one tensor, GB"
    )
    print(f"| {head} |\n|{'---|' * 8}")
    for layout in given.layouts or (*GGUF, *FOLDERS):
        with tempfile.TemporaryDirectory() as folder:
            write = write_gguf if layout in GGUF else write_folder
            path = write(Path(folder), layout, given.gb * 1e9)
            command = [sys.executable, "-m", "bench.packed_load", "--measure", str(path)]
            runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
        one = json.loads(runs[1].splitlines()[-1])
        values = [one["weights"] / 1e9, one["seconds"], one["cpu"], one["seconds"] / one["weights"] * 1e9]
        values += [one[name] / 1e9 for name in ("own", "rss", "largest")]
        print(f"| {layout} | {' | '.join(f'{value:.2f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
