"""`lamina.verify` of transformers models: small ones hold, and faults planted in them are named."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import BartConfig, Gemma2Config, GPT2Config, LlamaConfig, Mamba2Config
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from transformers.models.llama import modeling_llama

import lamina
from lamina.checking import Report
from lamina.checking.transformers import verify_transformers
from lamina.checking.transformers.paths import PATHS

SIZES: dict[str, Any] = dict(vocab_size=67, hidden_size=32, num_hidden_layers=3, intermediate_size=48)
HEADS: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "gemma2": Gemma2Config(**SIZES, **HEADS, head_dim=8, sliding_window=6),
    "mamba2": Mamba2Config(
        **SIZES, num_heads=8, head_dim=8, state_size=8, n_groups=2, chunk_size=8, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    ),
    "bart": BartConfig(
        vocab_size=67, d_model=32, encoder_layers=1, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        forced_eos_token_id=None,
    ),
    "gpt2": GPT2Config(vocab_size=67, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
}  # fmt: skip
HALF = 12  # the prompt of path "decode" in a row of 24 tokens


def model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if family == "bart" else transformers.AutoModelForCausalLM
    made = auto.from_config(CONFIGS[family], dtype=torch.float32, **changes).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def verified(subject: Any, *laws: str, caches: tuple[str, ...] = ("own", "static")) -> Report:
    """Without the caches of Lamina, which tests/bridge has; those are tried on healthy models."""
    return verify_transformers(subject, laws=laws or None, caches=caches, tries=1, progress=False)


def broken(report: Report) -> set[str]:
    return {found.law for found in report.differences}


def place(report: Report) -> tuple[str, int, int]:
    assert report.first is not None, str(report)
    return report.first.where, report.first.row, report.first.position


# -- what holds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "bart"])
def test_every_path_of_a_healthy_model_holds(family: str) -> None:
    report = lamina.verify(model(family), length=16, tries=1, progress=False)
    assert report and report.verdict.startswith("ok"), str(report)
    assert {"decode", "chunks", "padded", "continued", "crop", "reorder", "rows", "generate"} <= set(report.laws)
    assert "its cache, its static cache, lamina.bridge.Cache, growing" in str(report)


def test_mamba2_holds_but_for_the_continuation_that_generate_feeds_twice() -> None:
    report = verified(model("mamba2"))
    assert broken(report) == {"generate continued"}, str(report)
    assert not report and place(report) == ("layer 0", 0, 0)


def test_windows_count_padding_between_turns() -> None:
    """Which is why that path is tried when it is asked for."""
    assert verified(model("llama"), "continued ragged")
    report = verified(model("gemma2"), "continued ragged")
    assert not report and report.first is not None and report.first.kinds == {"sliding_attention"}


def test_learned_positions_are_wrong_in_a_padded_batch_without_position_ids() -> None:
    report = verified(model("gpt2"), "padded", "padded with positions")
    assert broken(report) == {"padded"}
    assert place(report) == ("before layer 0", 1, 0)  # row 0 is the longest and has no padding


def test_bfloat16_has_a_tolerance_of_its_own() -> None:
    report = verified(model("llama").to(torch.bfloat16), "decode", "padded")
    assert report, str(report)
    assert 1e-5 < report.worst["decode"] < 0.25


# -- planted faults ------------------------------------------------------------------------------------------------


def test_a_cache_layer_that_drops_the_token_before_the_last_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, right = model("llama"), DynamicLayer.update

    def wrong(self: Any, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Any:
        if k.shape[-1] and getattr(self, "third", False) and k.shape[-2] == HALF:
            k = torch.cat([k[..., :-2, :], k[..., -1:, :], k[..., -1:, :]], dim=-2)
        return right(self, k, v, *more, **named)

    monkeypatch.setattr(DynamicLayer, "update", wrong)
    _mark(monkeypatch, subject, layer=2)
    report = verified(subject, "decode")
    assert place(report) == ("layer 2", 0, HALF - 2), str(report)
    assert str(report.first).startswith(f"layer 2 (LlamaDecoderLayer), row 0, position {HALF - 2}: error ")
    assert "[law decode, its cache]" in str(report.first)


def test_positions_that_begin_at_zero_in_every_pass_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = model("llama")
    subject.model.rotary_emb.register_forward_pre_hook(
        lambda _, given, named: ((given[0],), {"position_ids": torch.arange(given[0].shape[1])[None]}),
        with_kwargs=True,
    )
    report = verified(subject, "decode", "two chunks")
    assert broken(report) == {"decode", "two chunks"}
    assert report.differences[0].where == "layer 0" and report.differences[0].position in (1, HALF)


def test_a_mask_that_forgets_padding_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda *given, **named: right(*given, **named | {"attention_mask": None})
    )
    report = verified(model("llama"))
    assert broken(report) == {"padded", "padded with positions", "continued", "generate", "generate continued"}
    assert place(report) == ("layer 0", 1, 0)


def test_a_state_that_is_not_carried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, right = model("mamba2"), LinearAttentionLayer.update_recurrent_state

    def wrong(self: Any, state: Tensor, *more: Any, **named: Any) -> Tensor:
        return right(self, torch.zeros_like(state) if getattr(self, "third", False) else state, *more, **named)

    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", wrong)
    _mark(monkeypatch, subject, layer=1)
    report = verified(subject, "decode", "chunks")
    assert broken(report) == {"decode", "chunks"}
    assert place(report)[0] == "layer 1" and report.first is not None and report.first.kinds == {"linear_attention"}


def test_rows_that_are_not_reordered_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DynamicLayer, "reorder_cache", lambda self, index: None)
    report = verified(model("llama"), "decode", "reorder")
    assert broken(report) == {"reorder"}
    assert place(report)[0] == "layer 0"


def test_a_crop_that_takes_back_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, tokens: int) -> None:
        if tokens:
            self.keys = torch.cat([self.keys[..., -tokens:, :]], dim=-2)  # the first ones instead of the last
            self.values = self.values[..., -tokens:, :]

    monkeypatch.setattr(DynamicLayer, "crop", wrong)
    report = verified(model("llama"), "crop")
    assert broken(report) == {"crop"} and place(report)[0] == "layer 0"


def test_a_cache_that_raises_is_told_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, *given: Any, **named: Any) -> Any:
        raise IndexError("no room")

    monkeypatch.setattr(transformers.cache_utils.StaticLayer, "update", wrong)
    report = verified(model("llama"), "decode")
    assert str(report.first) == (
        "layer 0 (LlamaDecoderLayer): raised IndexError: no room [law decode, its static cache]"
    )


# -- what paths stand on -------------------------------------------------------------------------------------------


def test_a_model_with_dropout_is_not_compared() -> None:
    subject = model("gpt2").train()
    report = verified(subject)
    assert broken(report) == {"determinism"} and "call model.eval()" in str(report)


def test_a_model_that_looks_ahead_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any, **named: Any) -> None:
        return None  # eager attention without a mask sees everything

    monkeypatch.setattr(modeling_llama, "create_causal_mask", wrong)
    report = verified(model("llama", attn_implementation="eager"))
    assert broken(report) == {"causality"} and place(report)[0] == "layer 0"
    assert "no path was tried" in str(report)


def test_what_cannot_be_verified_is_refused() -> None:
    with pytest.raises(lamina.InputError, match=r"there is no path 'chunking'.*known: decode"):
        verified(model("llama"), "chunking")
    with pytest.raises(lamina.InputError, match="laws is empty"):
        lamina.verify(model("llama"), laws=[])
    with pytest.raises(lamina.InputError, match=r"takes a lamina.Model or a transformers model, not Linear"):
        lamina.verify(torch.nn.Linear(2, 2))


def test_a_path_that_was_asked_for_and_does_not_exist_is_no_success() -> None:
    report = verified(model("mamba2"), "crop")
    assert not report and "not tried: crop" in str(report)
    assert "the cache says that it cannot be cropped" in str(report)


def test_the_model_is_left_as_it_was() -> None:
    subject = model("llama")
    before = {name: value.clone() for name, value in subject.state_dict().items()}
    attributes = set(subject.__dict__)
    verified(subject, "decode", "generate")
    assert all(torch.equal(value, before[name]) for name, value in subject.state_dict().items())
    assert set(subject.__dict__) == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.modules())
    assert not any("forward" in module.__dict__ for module in subject.modules())


def test_transformers_is_imported_only_inside_functions() -> None:
    for file in Path(str(lamina.checking.__file__)).parent.rglob("*.py"):
        imports = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [getattr(node, "module", None) or node.names[0].name for node in imports]
        assert not any(name.partition(".")[0] == "transformers" for name in names), file


def test_every_path_has_a_line_of_explanation() -> None:
    text = sys.modules[PATHS["decode"].__module__].__doc__ or ""
    assert [line.split("  ")[0] for line in text.splitlines() if "  " in line[1:] and not line.startswith(" ")] == [
        *PATHS
    ]


def _mark(monkeypatch: pytest.MonkeyPatch, subject: Any, layer: int) -> None:
    """Gives the cache layer of one layer of the model the mark that a fault looks for."""
    right = transformers.DynamicCache.__init__

    def marked(self: Any, *given: Any, **named: Any) -> None:
        right(self, *given, **named)
        self.layers[layer].third = True

    monkeypatch.setattr(transformers.DynamicCache, "__init__", marked)
