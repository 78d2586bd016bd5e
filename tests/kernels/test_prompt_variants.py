"""Captured prompts that read embeddings, and those that leave hidden states for scores, give what plain passes give."""

from __future__ import annotations

import pytest
import torch

from lamina.config import Config
from lamina.errors import InputError
from lamina.generation.prefill import scorer
from lamina.generation.prefill.prompt_reader import PromptReader
from lamina.model import Model
from lamina.models import family_of
from lamina.runtime import Graphs
from lamina.runtime.prompts.eligibility import why_not_prompted
from tests.kernels.passes import same
from tests.kernels.runs import small, tiny

WIDTHS = (8, 16)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, few_programs: None) -> None:
    """Graphs of few tokens, as if the model were on a GPU: the interpreter is slow."""
    monkeypatch.setattr("lamina.runtime.prompts.captured_prompt.WIDTHS", WIDTHS)
    monkeypatch.setattr(
        "lamina.generation.prefill.prompt_reader.why_no_prompts", lambda model, cache: why_not_prompted(cache)
    )


@pytest.fixture(scope="module")
def learned() -> Model:
    """A model with learned positions."""
    torch.manual_seed(0)
    config = Config(dict(model_type="gpt2", vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    return family_of(config).build(config)


def family(name: str, learned: Model) -> Model:
    return learned if name == "gpt2" else small(name)


# -- embeddings --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mamba2", "deepseek_v3"])
def test_ragged_embeddings_between_ids_are_plain_passes(name: str, learned: Model) -> None:
    torch.manual_seed(1)
    model = family(name, learned)
    one, captured, plain = Graphs(model).prompt_of(2), model.new_cache(2), model.new_cache(2)
    for tokens, counts, embedded in ((11, [11, 4], True), (5, [2, 5], False), (6, [0, 6], True)):
        ids = torch.randint(1, 30, (2, tokens))
        embeds = model.embed(ids) * 0.9
        if embedded:
            given = embeds.clone()
            given[torch.arange(tokens) >= torch.tensor(counts)[:, None]] = float("nan")  # padding may hold anything
            one.feed(captured, None, counts, embeds=given)
            model(cache=plain, counts=counts, logits="last", embeds=embeds)
        else:
            one.feed(captured, ids, counts)
            model(ids, cache=plain, counts=counts, logits="last")
        captured.poison()
        same(captured, plain)
    assert captured.tokens[1][:4] == [-1] * 4 and captured.tokens[1][-6:] == [-1] * 6 and one.captures == 3
    more = torch.tensor([[1, 2], [3, 4]])
    torch.testing.assert_close(model(more, cache=captured), model(more, cache=plain), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_of_embeddings_is_zeros_whatever_was_fed_before() -> None:
    model = tiny()
    one, embeds = Graphs(model).prompt_of(1), model.embed(torch.tensor([[3, 4, 5, 6]]))
    one.feed(model.new_cache(1), None, embeds=embeds * float("nan"))
    states = [one.feed(model.new_cache(1), None, embeds=embeds[:, :2], states=True) for _ in range(2)]
    assert all(x is not None and bool(x.isfinite().all()) for x in states)


@torch.no_grad()
def test_embeddings_of_another_width_leave_the_cache_as_it_was() -> None:
    model = small("mamba2")
    one, cache = Graphs(model).prompt_of(1), model.new_cache(1)
    with pytest.raises(InputError, match="embeddings are 5 wide, and the model's are 32 wide: compute them with"):
        one.feed(cache, None, embeds=torch.zeros(1, 3, 5))
    assert cache.tokens == [[]] and cache._open_pass is None
    one.feed(cache, None, embeds=model.embed(torch.tensor([[3, 4]])))
    assert cache.tokens == [[-1, -1]] and one.failed is None


@torch.no_grad()
def test_the_second_prompt_of_embeddings_is_captured_and_ids_are_counted_apart() -> None:
    model = tiny()
    model.graphs.clear()
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])
    by_ids = model.generate(ids, 2, eos_token_id=None)
    results = [model.generate(None, 2, inputs_embeds=model.embed(ids), eos_token_id=None) for _ in range(2)]
    assert "not captured, since a prompt of this size is captured when" in results[0].prompt_how
    assert results[1].prompt_how == "one captured graph of up to 4 tokens a row"
    for result in results:
        assert result.cache.tokens == [[-1] * 4 + row[4:] for row in by_ids.cache.tokens]


# -- scores ------------------------------------------------------------------------------------------------------------


TEXTS = [[5, 9, 12, 3, 44, 8, 21, 2, 2, 6, 13], [7, 1, 30], [4]]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_next"])
def test_scores_of_captured_texts_are_those_of_plain_passes(
    name: str, learned: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family(name, learned)
    model.graphs.clear()
    monkeypatch.setattr(scorer, "BLOCK_BYTES", 4 * model.vocab * 4)  # four tokens at a time
    sizes, unembed = [], model.unembed

    def counted(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.shape[:-1].numel())
        return unembed(x)

    monkeypatch.setattr(model, "unembed", counted)
    plain = model.score(TEXTS, top=2, start=[2, 0, 0])
    found = model.score(TEXTS, top=2, start=[2, 0, 0])
    assert "one pass" in plain.how and found.how == "one captured graph of up to 11 tokens a row"
    assert found.tokens == plain.tokens and max(sizes) <= 4
    same(found.cache, plain.cache)
    torch.testing.assert_close(torch.cat(found.logprobs), torch.cat(plain.logprobs), rtol=1e-4, atol=1e-4)
    assert [[id for both in one for id, _ in both] for one in found.top] == [
        [id for both in one for id, _ in both] for one in plain.top
    ]
    more = [[1, 2, 3], [], [9, 9]]
    behind, expected = (model.score(more, cache=one.cache) for one in (found, plain))
    torch.testing.assert_close(torch.cat(behind.logprobs), torch.cat(expected.logprobs), rtol=1e-4, atol=1e-4)
    pieces = model.score(TEXTS, prefill_chunk=7, start=[2, 0, 0])
    torch.testing.assert_close(torch.cat(pieces.logprobs), torch.cat(plain.logprobs), rtol=1e-4, atol=1e-4)


def test_prompts_that_are_scored_are_captured_when_another_one_comes() -> None:
    model = tiny()
    model.graphs.clear()
    results = [model.generate([[3, 4, 5, 6], [7]], 2, eos_token_id=None, prompt_logprobs=1) for _ in range(2)]
    assert "not captured, since a prompt of this size is captured when" in results[0].prompt_how
    assert results[1].prompt_how == "one captured graph of up to 4 tokens a row"
    assert results[0].tokens == results[1].tokens
    for one, other in zip(*(result.prompt_logprobs or [] for result in results), strict=True):
        assert [x and x.token for x in one] == [x and x.token for x in other]
        assert [x and x.logprob for x in one] == pytest.approx([x and x.logprob for x in other], abs=1e-4)


def test_a_graph_with_states_and_one_without_are_captured_apart() -> None:
    model = tiny()
    cache, graphs = model.new_cache(1), Graphs(model)
    with graphs.prompt_of(1) as one:
        one.prepare(cache, states=True)
        assert one.captures == len(WIDTHS) and one.wants(3, states=True) and not one.wants(3)
        left = one.feed(cache, torch.tensor([[1, 2, 3]]), states=True)
        assert left is not None and left.shape == (1, 8, 16)
        assert one.feed(cache, torch.tensor([[1, 2, 3]])) is None
    with PromptReader(model, model.new_cache(1)) as reader:
        assert reader.reason is None
