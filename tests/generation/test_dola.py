"""DoLa against its formula, computed by whole passes of transformers' models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.errors import InputError
from lamina.generation.strategies.dola import contrast, dola, premature_layers
from lamina.models.llama import Llama
from tests.families import test_t5
from tests.families.cases import FIRST
from tests.families.harness import pair
from tests.generation.strategies import PROMPTS, argmax_of, assert_can_be_continued, run_of
from tests.laws.toys import toy


def scores_by_definition(last: Tensor, early: Sequence[Tensor]) -> Tensor:
    """One row: logits [V] of the last layer and of each candidate."""
    p = last.softmax(dim=-1)
    distances = []
    for logits in early:
        middle = (p + logits.softmax(dim=-1)) / 2
        from_last = F.kl_div(last.log_softmax(dim=-1), middle, reduction="sum")
        from_early = F.kl_div(logits.log_softmax(dim=-1), middle, reduction="sum")
        distances.append(float(from_last + from_early) / 2)
    base = early[distances.index(max(distances))]
    kept = last.log_softmax(dim=-1) >= last.log_softmax(dim=-1).max() + math.log(0.1)
    return torch.where(kept, last.log_softmax(dim=-1) - base.log_softmax(dim=-1), -torch.inf)


def by_definition(theirs: Any, prompt: Sequence[int], new: int, layers: Sequence[int], **given: Any) -> list[int]:
    @torch.no_grad()
    def scores(ids: list[int]) -> Tensor:
        name = "decoder_input_ids" if given else "input_ids"
        out = theirs(**given, **{name: torch.tensor([ids])}, use_cache=False, output_hidden_states=True)
        states = out.decoder_hidden_states if given else out.hidden_states
        if "Mamba" in type(theirs).__name__:  # whose list begins after the first block
            states = (theirs.get_input_embeddings()(torch.tensor([ids])), *states)
        early = [theirs.get_output_embeddings()(states[layer][0, -1]).float() for layer in layers]
        return scores_by_definition(out.logits[0, -1].float(), early)

    return argmax_of(scores, prompt, new)


@pytest.mark.parametrize(("family", "name"), FIRST, ids=[family for family, _ in FIRST])
def test_every_family_gives_what_the_formula_gives_with_transformers_states(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    layers = tuple(range(len(ours.blocks)))
    for chosen in (layers, "high"):
        made = dola(run_of(ours, PROMPTS, dola_layers=chosen, max_new_tokens=9))
        used = premature_layers(ours, chosen)
        for prompt, tokens in zip(PROMPTS, made.tokens, strict=True):
            assert tokens == by_definition(theirs, prompt, 9, used)
    assert_can_be_continued(ours, made, PROMPTS)


def test_a_decoder_with_a_source_gives_what_the_formula_gives() -> None:
    theirs, ours = test_t5.pair(test_t5.FIRST)
    rows = test_t5.random_rows([9, 2, 5], seed=3)
    cache = ours.new_cache(3, source=test_t5.encode_rows(ours, rows))
    made = dola(run_of(ours, [[0], [0, 5, 6], [0, 9]], cache, dola_layers=(0, 1), max_new_tokens=6))
    for prompt, source, tokens in zip([[0], [0, 5, 6], [0, 9]], rows, made.tokens, strict=True):
        assert tokens == by_definition(theirs, prompt, 6, (0, 1), input_ids=source[None])


def test_many_rows_at_once_are_each_by_itself_also_with_extreme_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    last, early = torch.randn(5, 30, generator=draw) * 4, torch.randn(3, 5, 30, generator=draw) * 100
    found = contrast(last, early)
    expected = torch.stack([scores_by_definition(last[row], list(early[:, row])) for row in range(5)])
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected)


def test_rows_end_by_themselves_and_sampling_draws_from_the_contrast() -> None:
    model = pair("llama", "grouped")[1]
    whole = dola(run_of(model, PROMPTS, dola_layers="low", max_new_tokens=8)).tokens
    ends = (whole[1][2],)
    made = dola(run_of(model, PROMPTS, dola_layers="low", max_new_tokens=8, eos_token_id=ends))
    for row, tokens in enumerate(whole):
        assert made.tokens[row] == tokens[: tokens.index(ends[0]) + 1 if ends[0] in tokens else None]
    assert_can_be_continued(model, made, PROMPTS)
    values: dict[str, Any] = dict(dola_layers="low", max_new_tokens=8, do_sample=True, seed=4)
    drawn = dola(run_of(model, PROMPTS, **values)).tokens
    assert drawn != whole
    assert drawn[1:2] == dola(run_of(model, PROMPTS[1:2], row_ids=[1], **values)).tokens


class Depth:
    """As much of a model as choosing layers looks at."""

    def __init__(self, depth: int, tied: bool) -> None:
        self.blocks = range(depth)
        self.head, self.embedding = (torch.nn.Linear(1, 1) for _ in range(2))
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("depth", "tied", "chosen", "layers"),
    [
        (32, False, "low", list(range(0, 16, 2))),
        (32, True, "low", list(range(2, 16, 2))),
        (32, False, "high", list(range(16, 32, 2))),
        (60, False, "low", list(range(0, 20, 2))),
        (60, True, "high", list(range(40, 60, 2))),
        (4, True, "low", [2]),
        (2, True, "low", [1]),
        (1, True, "low", [0]),
        (1, False, "low", [0]),
        (8, True, (3, 1), [3, 1]),
    ],
)
def test_low_and_high_name_every_second_layer_of_a_half(depth: int, tied: bool, chosen: Any, layers: list[int]) -> None:
    assert premature_layers(Depth(depth, tied), chosen) == layers  # type: ignore[arg-type]


def test_layers_that_are_not_there_are_refused() -> None:
    for wrong in ((2,), (-1,), (), "middle"):
        with pytest.raises(InputError, match=r"dola_layers=.* layers from 0 .* to 1; .* with the last layer 2"):
            premature_layers(toy("full"), wrong)


def test_the_head_is_known_to_be_the_embedding() -> None:
    model = pair("llama", "tied, biases, own head dim")[1]
    assert isinstance(model, Llama)
    assert premature_layers(model, "low") == [1]
    assert premature_layers(pair("llama", "grouped")[1], "low") == [0]


def test_generate_contrasts_layers() -> None:
    model = pair("llama", "grouped")[1]
    result = model.generate(PROMPTS, dola_layers=[0, 1], max_new_tokens=6, output_scores=True, eos_token_id=())
    assert result.tokens == dola(run_of(model, PROMPTS, dola_layers=(0, 1), max_new_tokens=6)).tokens
    assert [row.argmax(dim=-1).tolist() for row in result.scores] == result.tokens


def test_hidden_states_that_the_head_cannot_read_are_refused() -> None:
    model = pair("gemma3n_text", "last layers share, wide inputs")[1]
    with pytest.raises(InputError, match="hidden states of Gemma3n are 128 wide, and its head reads 32 values"):
        model.generate([[1, 2]], dola_layers=[1], max_new_tokens=2)
