"""Hidden states and attentions on request: transformers' for every family, and the same from any pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.errors import InputError
from lamina.generation.introspect import introspect
from tests.families import test_t5
from tests.families.cases import FIRST
from tests.families.harness import TOLERANCE, pair, relative
from tests.generation.strategies import PROMPTS
from tests.laws.toys import KINDS, EncoderDecoder, assert_close, random_ids, toy

every_family = pytest.mark.parametrize(("family", "name"), FIRST, ids=[family for family, _ in FIRST])


def filled(model: Any) -> Any:
    """A cache with the prompts in it."""
    cache = model.new_cache(len(PROMPTS))
    width = max(map(len, PROMPTS))
    model(torch.tensor([row + [-1] * (width - len(row)) for row in PROMPTS]), cache=cache, counts=[*map(len, PROMPTS)])
    return cache


@torch.no_grad()
def theirs_on(theirs: Any, ids: list[int]) -> Any:
    return theirs(torch.tensor([ids]), use_cache=False, output_hidden_states=True, output_attentions=True)


@every_family
def test_hidden_states_of_ragged_rows_are_transformers(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    found = introspect(filled(ours)).hidden
    for states, prompt in zip(found, PROMPTS, strict=True):
        expected = theirs_on(theirs, prompt).hidden_states
        if "Mamba" in type(theirs).__name__:  # whose list begins after the first block
            expected = (theirs.get_input_embeddings()(torch.tensor([prompt])).detach(), *expected[:-2], expected[-1])
        assert len(states) == len(expected) == len(ours.blocks) + 1
        for one, other in zip(states, expected, strict=True):
            assert relative(one, other[0]) < TOLERANCE


@every_family
def test_attentions_of_ragged_rows_are_transformers(family: str, name: str) -> None:
    theirs, ours = pair(family, name)
    found = introspect(filled(ours), hidden=False, attentions=True).attentions
    for attended, prompt in zip(found, PROMPTS, strict=True):
        expected = [one for one in getattr(theirs_on(theirs, prompt), "attentions", ()) if one is not None]
        assert len(attended) == len(expected)
        for one, other in zip(attended.values(), expected, strict=True):
            assert relative(one, other[0]) < TOLERANCE


def test_a_decoder_with_a_source_has_hidden_states_and_both_attentions() -> None:
    theirs, ours = test_t5.pair(test_t5.FIRST)
    theirs.set_attn_implementation("eager")
    sources, targets = test_t5.random_rows([9, 2], seed=3), test_t5.random_rows([4, 7], seed=5)
    cache = ours.new_cache(2, source=test_t5.encode_rows(ours, sources))
    ours(torch.nn.utils.rnn.pad_sequence(targets, batch_first=True), cache=cache, counts=[4, 7])
    found = introspect(cache, attentions=True)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        with torch.no_grad():
            out = theirs(
                input_ids=source[None], decoder_input_ids=target[None], use_cache=False, output_hidden_states=True,
                output_attentions=True,
            )  # fmt: skip
        for one, other in zip(found.hidden[row], out.decoder_hidden_states, strict=True):
            assert relative(one, other[0]) < TOLERANCE
        for layer in range(len(ours.blocks)):
            attended = found.attentions[row]
            assert relative(attended[layer, "attention"], out.decoder_attentions[layer][0]) < TOLERANCE
            assert relative(attended[layer, "source"], out.cross_attentions[layer][0]) < TOLERANCE


@pytest.mark.parametrize("keeping", [dict(codec="int8"), dict(codec="k8v4", residence="host"), dict(residence="host")])
def test_sources_that_are_quantized_or_on_the_host_are_read_as_a_pass_reads_them(keeping: dict[str, Any]) -> None:
    ours = test_t5.pair(test_t5.FIRST)[1]
    cache = ours.new_cache(2, source=test_t5.encode_rows(ours, test_t5.random_rows([9, 2])), **keeping)
    ids = random_ids(2, 6)
    ours(ids[:, :5], cache=cache)
    step = cache.step(1)
    attended = step.record_attentions()
    ours.forward(ids[:, 5:], step)
    step.commit()
    found = introspect(cache, attentions=True)
    for row, length in enumerate([9, 2]):  # of layer 0, whose queries do not depend on codes of earlier ones
        weights = attended[0, "source"][0][row][..., :length]
        torch.testing.assert_close(found.attentions[row][0, "source"][:, 5:], weights, rtol=0.05, atol=0.01)


def by_position(shares: Tensor, positions: Tensor, length: int) -> Tensor:
    """shares [H, T, S] of slots that hold these positions [S] -> [H, T, length]"""
    there = positions >= 0
    out = shares.new_zeros(*shares.shape[:2], length)
    out[:, :, positions[there]] = shares[:, :, there]
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_with_a_cache_records_what_the_whole_pass_does(kind: str) -> None:
    model, ids = toy(kind), random_ids(2, 14)
    cache = model.new_cache(2, source=model.encode(ids[:, :3]) if isinstance(model, EncoderDecoder) else None)
    model(ids[:, :9], cache=cache)
    steps = []
    for piece in (ids[:, 9:10], ids[:, 10:13], ids[:, 13:]):
        cache.poison()
        step = cache.step(piece.shape[1])
        attended = step.record_attentions()
        model.forward(piece, step, hidden=range(len(model.blocks) + 1))
        step.commit()
        steps.append((step, attended))
    whole = introspect(cache, attentions=True)
    for row in range(2):
        for layer in range(len(model.blocks) + 1):
            found = torch.cat([step.hidden[layer][row] for step, _ in steps])
            assert_close(found, whole.hidden[row][layer][9:], kind)
        for key, expected in whole.attentions[row].items():
            parts = [by_position(shares[row], at[row], expected.shape[-1]) for shares, at in (a[key] for _, a in steps)]
            assert_close(torch.cat(parts, dim=1), expected[:, 9:], f"{kind} {key}")


def test_recording_changes_no_logits_and_nothing_is_kept_unasked() -> None:
    model, ids = pair("gemma2", "sliding and full in turn")[1], random_ids(2, 12)
    plain, asked = model.new_cache(2), model.new_cache(2)
    expected = model(ids, cache=plain)
    step = asked.step(12)
    step.record_attentions()
    found = model.forward(ids, step, hidden=(1,))
    step.commit()
    assert list(step.hidden) == [1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    other = asked.step(1)
    model.forward(ids[:, :1], other)
    assert other.hidden == {} and other.attended is None


def test_a_compiled_model_keeps_hidden_states_and_attentions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy("full")
    cache = model.new_cache(1)
    model(random_ids(1, 9), cache=cache)

    def refuse(*args: Any) -> Tensor:
        raise AssertionError("compiled blocks show nothing of themselves")

    monkeypatch.setattr(model, "compiled", refuse)
    step = cache.step(1)
    model.forward(random_ids(1, 1), step, hidden=(2,))
    step = cache.step(1)
    attended = step.record_attentions()
    model.forward(random_ids(1, 1), step)
    assert len(attended) == 2


def test_rows_that_were_given_embeddings_are_refused() -> None:
    model = toy("full")
    cache = model.new_cache(2)
    model(random_ids(2, 3), cache=cache)
    model(embeds=model.embed(random_ids(2, 1)), cache=cache, counts=[0, 1])
    with pytest.raises(InputError, match=r"token 3 of row 1 was given as an embedding, and whole rows .* give ids"):
        introspect(cache)


@pytest.mark.parametrize("way", [{}, {"num_beams": 2, "num_return_sequences": 2}, {"use_cache": False}])
def test_generate_gives_hidden_states_and_attentions_of_whole_rows(way: dict[str, Any]) -> None:
    theirs, ours = pair("llama", "grouped")
    result = ours.generate(
        PROMPTS, max_new_tokens=4, eos_token_id=(), output_hidden_states=True, output_attentions=True, **way
    )
    for r, (prompt, tokens) in enumerate(zip(result.prompts, result.tokens, strict=True)):
        expected = theirs_on(theirs, prompt + tokens)
        for one, other in zip(result.hidden_states[r], expected.hidden_states, strict=True):
            assert relative(one, other[0]) < TOLERANCE
        for one, other in zip(result.attentions[r].values(), expected.attentions, strict=True):
            assert relative(one, other[0]) < TOLERANCE


def test_what_was_not_asked_for_is_not_there() -> None:
    model = pair("llama", "grouped")[1]
    result = model.generate(PROMPTS, max_new_tokens=2, output_hidden_states=True)
    with pytest.raises(InputError, match="generate with output_attentions=True"):
        _ = result.attentions
    with pytest.raises(InputError, match="give ids instead of inputs_embeds"):
        model.generate(inputs_embeds=model.embed(torch.tensor([[1, 2]])), max_new_tokens=2, output_attentions=True)
