"""`lamina.bridge.attend`: attention over codes, pages and memory of the host without a dense copy; recurrent models run
their last tokens one by one, so that each can be dropped."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import chunked_causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from bench.bridge.host import Operations
from lamina import bridge
from lamina.bridge import attention, few_queries
from lamina.bridge.few_queries import by_products, flash
from lamina.bridge.layers.stored import Stored
from lamina.errors import InputError, RewindError
from lamina.notices import notice
from tests.bridge.models import CONFIGS, cache_argument, ids, model

KEPT: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "host": {"residence": "host"},
    "int4 on the host": {"codec": "int4", "residence": "host"},
}


@cache
def attending(name: str) -> Any:
    return bridge.attend(copy.deepcopy(model(name)))


@pytest.mark.parametrize("kept", [*KEPT, "pages"])
@pytest.mark.parametrize("name", [*CONFIGS, "gpt_oss", "falcon_h1"])
def test_the_tokens_are_those_of_the_dense_path(name: str, kept: str) -> None:
    assert attending(name).config._attn_implementation == "lamina"
    given, mask = ids()
    made = []
    for one in (model(name), attending(name)):
        stored = {"pool": bridge.Pool(tokens=256, page=8, codec="int8")} if kept == "pages" else KEPT[kept]
        found = one.generate(
            given, attention_mask=mask, past_key_values=bridge.Cache(one, **stored), do_sample=False, max_new_tokens=14,
        )  # fmt: skip
        made.append(found)
    assert torch.equal(*made)


def test_no_dense_copy_of_the_history_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(self: Stored) -> torch.Tensor:
        raise AssertionError("a dense copy was made")

    monkeypatch.setattr(Stored, "dense", dense)
    one = attending("gemma3")
    one.generate(ids()[0], past_key_values=bridge.Cache(one, codec="int8"), do_sample=False, max_new_tokens=9)


def test_the_dense_path_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    notice.cache_clear()
    given = ids(1)[0]
    for one in (attending("llama"), model("llama"), model("llama")):
        one.generate(given, past_key_values=bridge.Cache(one, codec="int8"), do_sample=False, max_new_tokens=3)
        said = [record.getMessage() for record in caplog.records if "dense copy" in record.getMessage()]
        assert len(said) == (one is model("llama"))
    assert "lamina.bridge.attend(model)" in said[0]


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next", "jamba", "mamba", "mamba2"])
@torch.inference_mode()
def test_tokens_of_a_recurrent_model_are_dropped_exactly(name: str) -> None:
    one, given, other = attending(name), ids(2, 14)[0], ids(2, 20)[0][:, 15:]
    cache = bridge.Cache(one, slack=4)
    argument = {cache_argument(name): cache}
    one(input_ids=given[:, :9], **argument)
    one(input_ids=given[:, 9:], **argument)
    cache.crop(-3)
    found = one(input_ids=other, **argument).logits
    whole = torch.cat([given[:, :11], other], dim=1)
    expected = model(name)(input_ids=whole, use_cache=False).logits[:, 11:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_without_attend_the_state_inside_a_pass_is_not_there_and_the_error_names_the_way_out() -> None:
    cache = bridge.Cache(model("falcon_h1"), slack=4)
    model("falcon_h1")(input_ids=ids(1, 9)[0], past_key_values=cache)
    with pytest.raises(RewindError, match=r"lamina\.bridge\.attend"):
        cache.crop(-2)


def test_a_model_without_attention_interface_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="attend needs a transformers model, not Linear"):
        bridge.attend(torch.nn.Linear(2, 2))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="BloomForCausalLM"):
        bridge.attend(bloom)


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("masked", ["no", "bool", "added"])
def test_attention_of_few_queries_is_that_of_pytorch(heads: int, masked: str) -> None:
    torch.manual_seed(0)
    T = 1 if masked == "no" else 3
    q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, heads, 40, 8)[:, :, :11], torch.randn(2, heads, 40, 6)[:, :, :11]
    seen = torch.rand(2, 1, T, 11) < 0.6
    seen[..., 0] = True
    mask = None if masked == "no" else seen if masked == "bool" else torch.where(seen, 0.5, -3.0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(by_products(q, k, v, mask, 0.3), expected.transpose(1, 2))


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_flash_of_one_query_has_a_row_for_each_key_head(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, scale: float) -> tuple[torch.Tensor]:
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return (found.transpose(1, 2).contiguous().transpose(1, 2),)  # as FlashAttention stores its results

    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", kernel)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 4, 8).transpose(1, 2), *torch.randn(2, 2, heads, 40, 8)[..., :11, :]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flash(q, k, v, 0.3), expected.transpose(1, 2))


def test_one_query_on_a_gpu_is_one_kernel_and_copies_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_queries, "suits", lambda *_: True)  # as on a GPU
    q = torch.empty(2, 1, 32, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    k, v = torch.empty(2, 2, 8, 500, 128, dtype=torch.bfloat16, device="meta")[..., :300, :]  # of larger stores
    with torch.no_grad(), Operations() as operations:
        found = few_queries.attend_one(q, k, v, None)
    assert found is not None and found.shape == (2, 1, 32, 128) and found.is_contiguous()
    assert operations.kernels == 1


def _masks(T: int, first: int, end: int, padded: int, **kwargs: Any) -> list[torch.Tensor | None]:
    """Ours and transformers' for the last T positions before `end`, over keys from `first` on; the first ones padded"""
    seen = None if not padded else torch.arange(end)[None] >= padded
    given = dict(batch_size=1, q_length=T, kv_length=end - first, q_offset=end - T, kv_offset=first, local_size=6)
    return [function(**given, attention_mask=seen, **kwargs) for function in (attention.mask, sdpa_mask)]


@pytest.mark.parametrize("padded", [0, 4])
def test_a_single_query_that_sees_its_whole_window_has_no_mask(padded: int) -> None:
    ours, theirs = _masks(1, 4, 10, padded, mask_function=sliding_window_causal_mask_function(6))
    assert ours is None and theirs is not None and theirs.all()


@pytest.mark.parametrize(("T", "first", "padded"), [(1, 4, 5), (2, 3, 0), (1, 3, 0)])
def test_padding_several_queries_and_older_keys_have_the_mask_of_transformers(T: int, first: int, padded: int) -> None:
    ours, theirs = _masks(T, first, 10, padded, mask_function=sliding_window_causal_mask_function(6))
    assert ours is not None and theirs is not None and torch.equal(ours, theirs) and not ours.all()


def test_a_query_over_chunks_keeps_its_mask() -> None:
    chunks = chunked_causal_mask_function(6, torch.zeros(1, dtype=torch.long))
    config = transformers.Llama4TextConfig(attention_chunk_size=6)
    ours, theirs = _masks(1, 4, 10, 0, mask_function=chunks, config=config)
    assert ours is not None and theirs is not None and torch.equal(ours, theirs) and not ours.all()


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    assert not by_products(q, k, k, torch.zeros(1, 1, 1, 5, dtype=torch.bool), 1.0).any()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("capacity", [None, 48])
def test_few_queries_over_dense_keys_give_the_same_tokens(
    name: str, capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def always(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:  # as it is on a GPU
        calls.append(query.shape[2])
        return query.shape[2] == 1

    monkeypatch.setattr(attention, "suits", always)
    given, mask = ids()
    expected = model(name).generate(given, attention_mask=mask, do_sample=False, max_new_tokens=14)
    cache = bridge.Cache(attending(name), capacity=capacity)
    found = attending(name).generate(
        given, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=14
    )
    assert torch.equal(found, expected) and 1 in calls
