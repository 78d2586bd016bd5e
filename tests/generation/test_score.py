"""Scores of given texts are those of the plain computation, and the logits of all tokens are never in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.bench.random_model import random_model
from lamina.errors import InputError
from lamina.generation.prefill import scorer
from lamina.model import Model
from tests.generation.rows import MORE, PROMPTS, model_of
from tests.generation.text import reader
from tests.planning.models import model as planned

ALL = [left + right for left, right in zip(PROMPTS, MORE, strict=True)]


def truth(model: Model, row: list[int], **how: Any) -> Tensor:
    """[T - 1, V] log-probabilities after each token but the last, by the plain computation over one row."""
    with torch.no_grad():
        logits = model(torch.tensor([row]), **how)
    assert logits is not None
    return logits[0, :-1].float().log_softmax(-1)


def check(found: Tensor, expected: Tensor, tokens: list[int]) -> None:
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(found, own, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba2", "qwen3_next", "deepseek_v3"])
def test_scores_are_those_of_all_logits_ragged_in_chunks_and_from_a_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    monkeypatch.setattr(scorer, "BLOCK_BYTES", 4 * model.vocab * 3)  # three tokens at a time
    whole = model.score(ALL, top=3)
    chunked = model.score(ALL, prefill_chunk=4)
    first = model.score(PROMPTS)
    after = model.score(MORE, cache=first.cache)
    assert after.cache is first.cache and first.cache.tokens == ALL == whole.cache.tokens
    assert chunked.timing.prompt_passes == 4 and chunked.timing.prompt_chunk == 4
    for r, row in enumerate(ALL):
        expected = truth(model, row)
        assert whole.tokens[r] == row[1:] and first.tokens[r] == PROMPTS[r][1:] and after.tokens[r] == MORE[r]
        check(whole.logprobs[r], expected, row[1:])
        check(chunked.logprobs[r], expected, row[1:])
        check(torch.cat([first.logprobs[r], after.logprobs[r]]), expected, row[1:])
        best = expected.topk(3)
        found = torch.tensor([[share for _, share in one] for one in whole.top[r]])
        torch.testing.assert_close(found, best.values, rtol=1e-4, atol=2e-4)
        assert [one[0][0] for one in whole.top[r]] == best.indices[:, 0].tolist()
        assert whole.sums[r] == pytest.approx(float(whole.logprobs[r].sum()))
        assert whole.perplexities[r] == pytest.approx(math.exp(-float(whole.logprobs[r].mean())))
    assert whole.perplexity == pytest.approx(math.exp(-float(torch.cat(whole.logprobs).mean())))
    continued = model.generate(MORE, 3, cache=after.cache, whole=False, eos_token_id=())  # the cache can go on
    longer = [row + more for row, more in zip(ALL, MORE, strict=True)]
    assert continued.tokens == model.generate(longer, 3, eos_token_id=()).tokens


def test_a_row_that_was_rewound_or_fed_without_logits_is_scored_from_its_first_new_token() -> None:
    model = model_of("llama")
    cache = model.new_cache()
    model([PROMPTS[0]], cache=cache, logits=None)
    found = model.score([MORE[0]], cache=cache)
    assert found.tokens == [MORE[0]]
    check(found.logprobs[0], truth(model, ALL[0])[len(PROMPTS[0]) - 1 :], MORE[0])
    slow = model_of("mamba2")
    cache = slow.new_cache()
    slow([PROMPTS[0]], cache=cache, logits=None)
    with pytest.raises(InputError, match=r"the logits after the last token of row 0 are not known.*slack=1"):
        slow.score([MORE[0]], cache=cache)
    assert cache.tokens == [PROMPTS[0]]


def test_a_cache_of_one_row_serves_many_endings_and_stays_as_it_is() -> None:
    model = model_of("llama")
    cache = model.score([PROMPTS[0]]).cache
    found = model.score(MORE, cache=cache, start=[0, 0, 2])
    assert cache.tokens == [PROMPTS[0]]
    for r, (more, start) in enumerate(zip(MORE, (0, 0, 2), strict=True)):
        assert found.tokens[r] == more[start:]
        check(found.logprobs[r], truth(model, PROMPTS[0] + more)[len(PROMPTS[0]) - 1 + start :], more[start:])


def test_targets_of_an_encoder_decoder_are_scored() -> None:
    model = planned("t5", torch.float32)
    found = model.score(PROMPTS, decoder_input_ids=MORE)
    start = found.cache.tokens[0][0]
    for r, target in enumerate(MORE):
        assert found.tokens[r] == target
        source = model.encode(torch.tensor([PROMPTS[r]]))
        check(found.logprobs[r], truth(model, [start, *target], source=source), target)


def test_texts_and_chats_are_scored_as_prompts_are_read() -> None:
    model = reader()
    text = "the theory of the thing"
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text)
    assert model.score(text).tokens == [ids[1:]]
    assert model.score(ids).sums == model.score(text).sums


def test_prompt_logprobs_of_generate_are_scores_and_none_where_nothing_was_computed() -> None:
    model = model_of("llama")
    found = model.generate(PROMPTS, 2, prompt_logprobs=2, eos_token_id=())
    for prompt, row, own in zip(PROMPTS, found.prompt_logprobs, model.score(PROMPTS).logprobs, strict=True):
        assert row[0] is None and [one.token for one in row[1:] if one] == prompt[1:]
        assert [one.logprob for one in row[1:] if one] == pytest.approx(own.tolist(), abs=1e-5)
        assert all(one is None or len(one.top) == 2 for one in row)
    cache = model.score([PROMPTS[0][:4]]).cache
    reused = model.generate([PROMPTS[0]], 1, cache=cache, prompt_logprobs=0)
    assert reused.reused == [4] and [one is None for one in reused.prompt_logprobs[0]] == [True] * 4 + [False] * 7
    with pytest.raises(InputError, match="prompt_logprobs=0 or more"):
        _ = model.generate(PROMPTS, 1).prompt_logprobs


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"top": -1}, "top=-1"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"start": [1, 2]}, "one for each of the 1 texts"),
        ({"progress": 3}, "progress=3"),
    ],
)
def test_wrong_arguments_are_refused_by_name(how: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        model_of("llama").score([[5, 6]], **how)


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that any operation returns."""

    values = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.values = max([self.values, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
        return out


def test_the_logits_of_all_tokens_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocab = 96, 5000
    model = random_model(
        dict(model_type="llama", hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
             vocab_size=vocab, max_position_embeddings=256),
        torch.float32, "cpu",
    )  # fmt: skip
    monkeypatch.setattr(scorer, "BLOCK_BYTES", 4 * vocab * 8)
    ids = torch.randint(vocab, (1, tokens))
    with Largest() as seen:
        found = model.score(ids)
    assert seen.values < tokens * vocab / 5
    check(found.logprobs[0], truth(model, ids[0].tolist()), ids[0, 1:].tolist())
