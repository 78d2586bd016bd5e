"""Small checkpoints written into a temporary folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
SaveFolder = Callable[..., Path]


@pytest.fixture
def save_folder(tmp_path: Path) -> SaveFolder:
    """Write a checkpoint folder: config, and either one file or several shards with an index."""

    def save(tensors: Tensors, config: dict[str, Any] | None = None, shards: int = 0, name: str = "model") -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        if not shards:
            save_file(tensors, tmp_path / f"{name}.safetensors")
            return tmp_path
        places = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
            save_file(part, tmp_path / file)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return save
