"""`lamina.bridge.attend`: attention over codes, pages and memory of the host without a dense copy; recurrent models run
their last tokens one by one, so that each can be dropped."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
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
