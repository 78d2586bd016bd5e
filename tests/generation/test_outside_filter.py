"""A sampling filter from outside the package is one class and one declaration, and works like the built-in ones.

That it works in captured decoding is shown in tests/kernels/test_replay.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import lamina
from lamina.errors import InputError
from lamina.generation import Settings
from lamina.generation.settings.settings import settings_of
from lamina.model import Model
from lamina.sampling import Facts, Filter, Number, Setting, Stage, below_best, chain_of
from tests.families.cases.llama import make
from tests.families.harness import pair

# -- the filter --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NearBest(Filter):
    """Keeps ids whose score is within `share` of the row's score range from the best."""

    share: float
    keep: int = 1

    def cut(self, scores: Tensor) -> Tensor:
        best, worst = scores.amax(dim=-1, keepdim=True), scores.amin(dim=-1, keepdim=True)
        return (scores < best - self.share * (best - worst)) & below_best(scores, self.keep)


NEAR_BEST = Setting(
    "near_best", Number(0, 1), default=1.0, meaning="Keep tokens whose score is within this share of the score range.",
    stage=Stage.FILTER, processor=lambda share, context: NearBest(share, context.keep),
)  # fmt: skip

# -- what it does ------------------------------------------------------------------------------------------------------

PROMPTS = [[5, 9, 12], [7]]
SAMPLED: dict[str, Any] = dict(do_sample=True, top_k=0, eos_token_id=(), seed=3)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    lamina.register_setting(NEAR_BEST)
    yield
    lamina.unregister_setting("near_best")


@pytest.fixture(scope="module")
def model() -> Model:
    return pair("gemma2", "sliding and full in turn")[1]


@pytest.mark.parametrize(
    "way",
    [{}, dict(num_beams=2), dict(prompt_lookup_num_tokens=2), dict(assistant_early_exit=1), dict(dola_layers="low")],
    ids=str,
)
def test_it_filters_with_every_strategy_that_samples(model: Model, way: dict[str, Any]) -> None:
    """A share of 0 leaves the best id alone, with beams the two best ones."""
    found = model.generate(PROMPTS, 4, **SAMPLED, **way, near_best=0.0).tokens
    assert found == model.generate(PROMPTS, 4, **SAMPLED | dict(top_k=1), **way).tokens
    assert found != model.generate(PROMPTS, 4, **SAMPLED, **way).tokens


def test_its_place_is_after_the_other_filters_and_before_what_follows_them(model: Model) -> None:
    given = dict(do_sample=True, temperature=0.5, eta_cutoff=0.1, near_best=0.3, renormalize_logits=True)
    chain = chain_of(settings_of(model, given), Facts(model.vocab))
    names = [type(one).__name__ for one in chain]
    assert names == ["Temperature", "TopK", "Eta", "NearBest", "Renormalize"] and chain[3] == NearBest(0.3, keep=1)
    off = chain_of(settings_of(model, given | dict(near_best=None)), Facts(model.vocab))
    assert [type(one).__name__ for one in off] == ["Temperature", "TopK", "Eta", "Renormalize"]


def test_settings_know_it(model: Model) -> None:
    found = settings_of(model, dict(do_sample=True, near_best=0.25))
    assert found.near_best == 0.25 and "do_sample=True, near_best=0.25" in found.describe()
    assert settings_of(model, {}).near_best == 1.0 and Settings(added={"near_best": 0.5}).near_best == 0.5
    assert found == settings_of(model, dict(do_sample=True, near_best=0.25)) != settings_of(model, dict(do_sample=True))
    with pytest.raises(AttributeError, match="Settings has no attribute 'near_bets'"):
        found.near_bets  # noqa: B018


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(do_sample=True, near_best=1.5), "near_best=1.5: it must be a number, at least 0 and at most 1"),
        (dict(do_sample=True, near_best="x"), "near_best='x': it must be a number"),
        (dict(do_sample=False, near_best=0.5), "near_best=0.5 and do_sample=False: near_best applies to sampling only"),
        (dict(near_bets=0.5), "there is no parameter 'near_bets'; the nearest known one is 'near_best'"),
    ],
)
def test_wrong_values_and_names_give_the_errors_of_built_in_settings(
    model: Model, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model.generate(PROMPTS, 2, **given)


def test_without_do_sample_it_samples(model: Model) -> None:
    assert settings_of(model, dict(near_best=0.5)) == settings_of(model, dict(near_best=0.5, do_sample=True))


def test_a_checkpoints_file_may_hold_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(make()).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "near_best": 0.5}))
    model = lamina.load(tmp_path, device="cpu")
    assert settings_of(model, {}).near_best == 0.5  # type: ignore[attr-defined]
    assert settings_of(model, dict(do_sample=False)).near_best == 1.0  # type: ignore[attr-defined]
    file.write_text(json.dumps({"do_sample": True, "near_best": 5}))
    with pytest.raises(InputError, match=r"generation_config.json says near_best=5: it must be a number"):
        settings_of(lamina.load(tmp_path, device="cpu"), {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (NEAR_BEST, "there is a setting 'near_best' already"),
        (Setting("top_p", Number(0, 1), 1.0, "Twice."), "there is a setting 'top_p' already"),
        (Setting("prefill_chunk_size", Number(0, 1), 1.0, "An alias."), r"'prefill_chunk_size' already \(prefill"),
        (Setting("cache", Number(0, 1), 1.0, "Taken."), "cannot be called 'cache'"),
        (Setting("describe", Number(0, 1), 1.0, "Taken."), "cannot be called 'describe'"),
        (Setting("added", Number(0, 1), 1.0, "Taken."), "cannot be called 'added'"),
        (Setting("near best", Number(0, 1), 1.0, "No name."), "cannot be called 'near best': it must be a Python name"),
        (Setting("mine", Number(0, 1), 2.0, "Out of bounds."), "mine has default=2.0: it must be a number, at least 0"),
        (Setting("mine", Number(0, 1), 1.0, "No group.", group="x"), "mine has group='x': it must be one of length, "),
        (Setting("mine", Number(0, 1), 1.0, "No processor.", stage=Stage.BAN), "must have a stage and a processor"),
    ],
    ids=lambda one: one.name if isinstance(one, Setting) else "",
)  # fmt: skip
def test_declarations_that_cannot_be_used_are_refused(setting: Setting, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lamina.register_setting(setting)


def test_built_in_settings_cannot_be_removed() -> None:
    with pytest.raises(InputError, match="'top_p' is not an added setting; the nearest one is 'near_best'"):
        lamina.unregister_setting("top_p")
