"""`cache.save`, `lamina.bridge.load_cache` and `cache.fork`: rows go on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from lamina.errors import CacheFileError
from tests.bridge.models import cache_argument, ids, model

NAMES = ["llama", "gemma3", "falcon_h1", "qwen3_next", "lfm2", "mamba2", "deepseek_v3"]
KEPT: list[dict[str, Any]] = [{}, {"codec": "int8"}, {"capacity": 40}, {"slack": 3}, {"residence": "host"}]


def go_on(name: str, cache: Any) -> torch.Tensor:
    """Logits of four more passes."""
    argument = {cache_argument(name): cache}
    return torch.cat([model(name)(one, **argument).logits for one in ids(2, 16)[0][:, 12:].split(1, dim=1)], dim=1)


def filled(name: str, **kept: Any) -> Any:
    cache = bridge.Cache(model(name), **kept)
    model(name)(ids(2, 16)[0][:, :11], **{cache_argument(name): cache})
    model(name)(ids(2, 16)[0][:, 11:12], **{cache_argument(name): cache})
    return cache


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_loaded_cache_and_a_fork_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    kept = KEPT[NAMES.index(name) % len(KEPT)]
    cache = filled(name, **({} if kept.get("codec") and name == "mamba2" else kept))
    cache.save(tmp_path / "talk.cache")
    copies = [cache.fork(), bridge.load_cache(tmp_path / "talk.cache", model(name))]
    expected = go_on(name, cache)
    for copy in copies:
        assert torch.equal(go_on(name, copy), expected)


@torch.inference_mode()
def test_a_fork_does_not_see_what_the_other_stores() -> None:
    cache = filled("llama")
    fork = cache.fork()
    go_on("llama", cache)
    assert cache.get_seq_length() == 16 and fork.get_seq_length() == 12


@torch.inference_mode()
def test_both_halves_of_an_encoder_decoder_cache_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    bart = transformers.BartForConditionalGeneration(config).eval()
    cache = bridge.Cache(bart)
    encoded = bart.get_encoder()(ids(1)[0])
    bart(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[2, 5, 6]]), past_key_values=cache)
    cache.save(tmp_path / "both.cache")
    found = [
        bart(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[7]]), past_key_values=one).logits
        for one in (bridge.load_cache(tmp_path / "both.cache", bart), cache)
    ]
    assert torch.equal(*found)


@torch.inference_mode()
def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    filled("llama").save(tmp_path / "llama.cache")
    with pytest.raises(CacheFileError):
        bridge.load_cache(tmp_path / "llama.cache", model("gemma3"))
