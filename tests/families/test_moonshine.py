"""Moonshine gives transformers' states and logits for recordings of any length."""

from __future__ import annotations

import random
import tempfile
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MoonshineConfig, MoonshineForConditionalGeneration

import lamina
from lamina.errors import InputError
from lamina.models.moonshine import Moonshine
from lamina.runtime.eligibility import why_no_kernels
from tests.families.encoder_decoder_cases import MOONSHINE_SIZES
from tests.families.harness import TOLERANCE, random_ids, relative, run_ragged

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases, relu, untied": dict(
        attention_bias=True, encoder_hidden_act="relu", decoder_hidden_act="relu", tie_word_embeddings=False,
    ),
    "half rotary, padded heads, deep decoder": dict(
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        pad_head_dim_to_multiple_of=24, decoder_num_hidden_layers=3, encoder_num_hidden_layers=1,
    ),
}  # fmt: skip


def pair(name: str) -> tuple[Any, Moonshine]:
    torch.manual_seed(0)
    config = MoonshineConfig(**MOONSHINE_SIZES | CASES[name])
    theirs = MoonshineForConditionalGeneration._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lamina.load(folder, device="cpu")
    assert isinstance(ours, Moonshine)
    return theirs, ours


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_states_and_logits_are_those_of_transformers(name: str) -> None:
    theirs, ours = pair(name)
    waves, lengths = torch.randn(3, 6000), [6000, 3001, 895]
    source = ours.encode(None, lengths, waves=waves)
    targets = [random_ids(1, n, 67, seed=r)[0] for r, n in enumerate((20, 9, 1))]
    found = run_ragged(ours, targets, ours.new_cache(3, source=source), random.Random(0))
    for row, (wave, n, target) in enumerate(zip(waves, lengths, targets, strict=True)):
        true = theirs(input_values=wave[None, :n], decoder_input_ids=target[None], use_cache=False)
        states = true.encoder_last_hidden_state[0]
        assert int(source.lengths[row]) == len(states)
        assert relative(source.states[row, : len(states)], states) < TOLERANCE
        assert relative(found[row], true.logits[0]) < TOLERANCE
    assert why_no_kernels(ours.specs, None, torch.float32) is None
    report = lamina.verify(ours, tries=1) if name == "plain" else None
    assert report is None or report.ok, str(report)


def test_rows_of_different_lengths_are_encoded_at_once_by_the_program_that_is_exported() -> None:
    _, ours = pair("plain")
    waves, lengths = torch.randn(3, 6000), [6000, 3001, 0]
    source = ours.trace_source(waves, torch.tensor(lengths))
    assert source.lengths.tolist()[2] == 0  # a row that keeps the source it has
    for row, n in enumerate(lengths[:2]):
        alone = ours.encode(waves=waves[row : row + 1, :n])
        assert int(source.lengths[row]) == int(alone.lengths[0])
        assert relative(source.states[row, : int(alone.lengths[0])], alone.states[0]) < TOLERANCE


def test_errors_say_what_a_source_is() -> None:
    _, ours = pair("plain")
    with pytest.raises(InputError, match="is audio, not ids"):
        ours.encode([[1, 2]])
    with pytest.raises(InputError, match="has 894 samples, and the encoder needs 895"):
        ours.encode(waves=torch.zeros(1, 894))
    with pytest.raises(InputError, match="decoder_num_key_value_heads=1"):
        Moonshine.build(ours.config.with_values(decoder_num_key_value_heads=1))


def test_recordings_become_text_as_they_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair("plain")
    monkeypatch.setattr(type(ours), "generate", partialmethod(spelt, type(ours).generate))
    recordings = [torch.randn(8000).numpy(), torch.randn(2000).numpy()]
    together = ours.transcribe(recordings, rate=8000, max_new_tokens=5, eos_token_id=[])
    assert together == [ours.transcribe(one, rate=8000, max_new_tokens=5, eos_token_id=[]) for one in recordings]
    assert len(str(ours.transcribe(recordings[0], rate=8000, eos_token_id=[])).split()) == 7  # 6.5 for a second


def spelt(model: Moonshine, generate: Any, **options: Any) -> Any:
    """The result of `generate` with ids as text."""
    result = generate(model, **options)
    return SimpleNamespace(text=[" ".join(map(str, row)) for row in result.tokens])
