"""GGUF files of llama.cpp's converter against their originals: `python -m bench.gguf_converter LLAMA_CPP [FAMILY …]`

LLAMA_CPP is a checkout of llama.cpp. The models are the small random ones of tests/checkpoint/test_gguf_families.py,
with the fields that published configurations have besides those that transformers writes; vocabularies are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import lamina
from tests.checkpoint.test_gguf_families import CASES, save
from tests.families.harness import random_ids, relative

CONVERT = """
import logging, sys, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf
from pathlib import Path
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
logging.disable(logging.CRITICAL)
for line in sys.stdin.read().split("\\n"):
    folder, out = map(Path, line.split("\\t"))
    try:
        with torch.inference_mode():
            kind = get_model_class(get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT))
            made = type("Made", (kind,), dict(model_arch=kind.model_arch, no_mtp=True, set_vocab=lambda self: None))
            made(folder, gguf.LlamaFileType.ALL_F32, out).write()
    except Exception as error:
        out.with_suffix(".txt").write_text(f"{type(error).__name__}: {error}")
"""
"""Run in a process of its own, since llama.cpp has its own version of the package gguf."""


def kimi_fields(c: dict[str, Any]) -> dict[str, Any]:
    full = [i + 1 for i, kind in enumerate(c["layer_types"]) if kind == "full_attention"]
    sizes = {"head_dim": c["linear_head_dim"], "num_heads": c["linear_num_heads"], "full_attn_layers": full}
    return {
        "linear_attn_config": sizes | {"short_conv_kernel_size": c["linear_conv_kernel_dim"]},
        "first_k_dense_replace": c["mlp_layer_types"].index("sparse"),
    }


def head_width(c: dict[str, Any]) -> int:
    return int(c["hidden_size"] // c["num_attention_heads"])


FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "cohere2": lambda c: {"rotary_pct": 1.0},
    "gpt2": lambda c: {"n_ctx": c["n_positions"]},
    "falcon": lambda c: {} if c["new_decoder_architecture"] else {"num_kv_heads": 1},
    "falcon_h1": lambda c: {"head_dim": c.get("head_dim") or head_width(c)},
    "nemotron_h": lambda c: {"d_head": c["mamba_head_dim"]},
    "bamba": lambda c: {"attn_rotary_emb": int(head_width(c) * c["rope_parameters"]["partial_rotary_factor"])},
    "kimi_linear": kimi_fields,
}
"""Fields of published configurations, by family."""


def publish(family: str, folder: Path) -> None:
    """Makes a folder that transformers saved look like a published one."""
    config = json.loads((folder / "config.json").read_text())
    config |= FIELDS.get(family, lambda c: {})(config)
    (folder / "config.json").write_text(json.dumps(config))
    if family in ("gemma3_text", "gemma4_text"):  # the converter counts its tokens
        vocab = {str(i): i for i in range(config["vocab_size"])}
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))
    if family == "kimi_linear":
        dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
        tensors = {dense.sub("mlp", name): x for name, x in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main(checkout: str, families: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        chosen = [case for case in CASES if not case.older and (not families or case.family in families)]
        made = [(case, Path(place) / f"{i}", Path(place) / f"{i}.gguf") for i, case in enumerate(chosen)]
        for case, folder, _ in made:
            save(case, folder)
            publish(case.family, folder)
        lines = "\n".join(f"{folder}\t{out}" for _, folder, out in made)
        subprocess.run(
            [sys.executable, "-c", CONVERT, checkout], input=lines, text=True, capture_output=True, check=True
        )
        for case, folder, out in made:
            if not out.exists():
                print(f"{case!s:64} not converted: {out.with_suffix('.txt').read_text()[:100]}")
                continue
            (folder / "tokenizer.json").unlink(missing_ok=True)
            original, ours = (lamina.load(path, device="cpu", dtype="float32") for path in (folder, out))
            ids = random_ids(1, 24, original.vocab)
            print(f"{case!s:64} {relative(ours(ids), original(ids)):.1e}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    main(sys.argv[1], sys.argv[2:])
