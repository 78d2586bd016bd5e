"""BERT and relatives with cross-attention and no encoder: they read a source that is given as states."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import lamina
from lamina.cache import Source
from lamina.checkpoint import open_source
from lamina.config import Config
from lamina.errors import InputError
from lamina.models import family_of
from lamina.models.bert import KINDS, Bert
from lamina.runtime.eligibility import why_no_kernels
from tests.families.cases.bert import FAMILIES
from tests.families.harness import TOLERANCE, random_cuts, random_ids, relative, run_in_pieces, run_ragged

LENGTH = 24


def pair(family: str) -> tuple[Any, Bert]:
    torch.manual_seed(0)
    config = FAMILIES[family]["plain"](add_cross_attention=True)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lamina.load(folder, device="cpu")
    assert isinstance(ours, Bert)
    return theirs, ours


@torch.no_grad()
def truth(theirs: Any, states: Tensor, target: Tensor) -> Tensor:
    """One row in one uncached pass. states [S, width], target [T] -> [T, vocab]"""
    return theirs(target[None], encoder_hidden_states=states[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_with_cross_attention_reads_the_states_it_is_given(family: str) -> None:
    theirs, ours = pair(family)
    states, lengths = torch.randn(3, 9, 32), torch.tensor([9, 4, 1])
    source = Source(states, lengths)
    targets = [random_ids(1, n, 60, seed=r)[0] + 7 for r, n in enumerate((LENGTH, 10, 1))]
    each = [row[:n] for row, n in zip(states, lengths, strict=True)]
    expected = [truth(theirs, *row) for row in zip(each, targets, strict=True)]
    alone = Source(states[:1], lengths[:1])
    assert relative(ours(targets[0][None], source=alone)[0], expected[0]) < TOLERANCE, "one pass"
    rng = random.Random(0)
    cache = ours.new_cache(source=alone)
    logits = run_in_pieces(ours, targets[0][None], cache, random_cuts(LENGTH, rng))
    assert relative(logits[0], expected[0]) < TOLERANCE, "in pieces"
    for found, true in zip(run_ragged(ours, targets, ours.new_cache(3, source=source), rng), expected, strict=True):
        assert relative(found, true) < TOLERANCE, "ragged"
    start = targets[1].tolist()
    tokens = ours.generate([start], 4, cache=ours.new_cache(source=source.select([1])), suppress_tokens=[2]).tokens[0]
    logits = truth(theirs, each[1], torch.tensor(start + tokens))[len(start) - 1 : -1]
    logits[:, 2] = -1e3
    assert logits.argmax(-1).tolist() == tokens
    assert why_no_kernels(ours.specs, None, torch.float32) is None


def test_verify_passes_and_errors_say_where_a_source_comes_from() -> None:
    _, ours = pair("electra")
    report = lamina.verify(ours, tries=1)
    assert report.ok, str(report)
    with pytest.raises(InputError, match=r"Bert has no encoder.*Source\(states, lengths\)"):
        ours.encode([[1, 2]])
    with pytest.raises(InputError, match="reads a source, and none is attached"):
        ours([[1, 2]])


@pytest.mark.parametrize("family", KINDS)
def test_options_that_are_not_supported_are_named(family: str) -> None:
    config = Config(FAMILIES[family]["plain"]().to_dict())
    for name, value in (("is_decoder", False), ("position_embedding_type", "relative_key")):
        changed = config.with_values(**{name: value})
        with pytest.raises(InputError, match=f"{name}={value!r}"):
            family_of(changed).build(changed)


def test_pairs_of_other_families_are_refused_by_name() -> None:
    parts = {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "gpt2", "is_decoder": True}}
    config = Config({"model_type": "encoder-decoder"} | parts)
    with pytest.raises(InputError, match="add_cross_attention=False"):
        family_of(config).build(config)
    parts["decoder"]["add_cross_attention"] = True
    with pytest.raises(InputError, match="model_type='gpt2'"):
        family_of(config).build(config)


def test_norms_of_the_first_checkpoints_are_called_gamma_and_beta() -> None:
    from safetensors.torch import load_file, save_file

    theirs, ours = pair("bert")
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        path = open_source(folder).path / "model.safetensors"
        old = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in load_file(path).items()
        }
        save_file(old | {"bert.pooler.dense.weight": torch.zeros(32, 32)}, path)
        again = lamina.load(folder, device="cpu")
    source = Source(torch.randn(1, 3, 32), torch.tensor([3]))
    assert torch.equal(again([[5, 6]], source=source), ours([[5, 6]], source=source))
