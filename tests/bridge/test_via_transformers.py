"""Models whose blocks are transformers' own, over Lamina's caches: the same logits, laws and tokens.

Families that Lamina has are run both ways; the others are compared with transformers' uncached pass.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING as CONFIGS
from transformers import AutoModelForCausalLM, BartForConditionalGeneration, LlamaForCausalLM

import lamina
from lamina import CheckpointError, InputError, Model, RewindError
from lamina.bridge.hf_blocks.model import TransformersModel
from lamina.bridge.hf_blocks.stack import reaches
from tests.families.cases import CASES
from tests.families.cases.llama import make
from tests.families.encoder_decoder_cases import FAMILIES as PAIRS
from tests.families.harness import TOLERANCE, WRONG_IN_EAGER, random_cuts, random_ids, relative, run_in_pieces, truth

SIZES: dict[str, Any] = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LATENTS: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
    n_group=1, topk_group=1,
)  # fmt: skip
SWA: dict[str, Any] = dict(sliding_window=6, num_hidden_layers=4)
OTHERS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": EXPERTS | LATENTS | dict(layer_group_size=2, n_routed_experts=4),
    "big_bird": dict(is_decoder=True, attention_type="original_full"),
    "cohere2_moe": SWA | EXPERTS,
    "ctrl": dict(n_embd=32, n_layer=2, n_head=4, dff=48, n_positions=64),
    "data2vec-text": dict(is_decoder=True),
    "gpt_neox_japanese": dict(intermediate_multiple_size=2),
    "jetmoe": dict(kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "persimmon": {},
    "vaultgemma": SWA,
}
"""Families that Lamina does not have: sliding and full attention, latents and linear attention, attention that models
compute by themselves (big_bird, gpt_neox_japanese), positions that they count by themselves (data2vec-text)."""


WRONG = {"big_bird"} if transformers.__version__.startswith("5.17.") else set()
"""Families that transformers itself computes wrongly: 5.17's BigBird is not causal. Older versions also have fewer."""


@functools.cache
def other(family: str) -> tuple[Any, Model]:
    torch.manual_seed(0)
    config = CONFIGS[family](**SIZES | OTHERS[family])
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return theirs, lamina.from_transformers(shaken(theirs))


@functools.cache
def known(family: str) -> tuple[Any, Model]:
    """A family that Lamina has, with the blocks of transformers."""
    torch.manual_seed(0)
    attention = "sdpa" if family in WRONG_IN_EAGER else "eager"
    config = next(iter(CASES[family].values()))()
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    return theirs, lamina.from_transformers(shaken(theirs), via="transformers")


@torch.no_grad()
def shaken(theirs: Any) -> Any:
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    return theirs


def kinds(model: Model) -> set[str]:
    return {layer.kind for layer in model.new_cache().every_layer()}


@pytest.mark.parametrize("family", [family for family in OTHERS if family in CONFIGS and family not in WRONG])
def test_a_family_that_lamina_does_not_have_gives_transformers_logits_and_tokens(family: str) -> None:
    theirs, ours = other(family)
    assert isinstance(ours, TransformersModel)
    ids = random_ids(2, 24, 60) + 3
    expected, rng = truth(theirs, ids), random.Random(0)
    assert relative(ours(ids), expected) < TOLERANCE, "one pass"
    found = run_in_pieces(ours, ids, ours.new_cache(2), random_cuts(24, rng))
    assert relative(found, expected) < TOLERANCE, "in pieces"
    rows = [row.tolist() for row in ids[:, :14]]
    new = ours.generate(rows, 6, do_sample=False, eos_token_id=(), suppress_tokens=[0]).tokens
    logits = truth(theirs, torch.cat([ids[:, :14], torch.tensor(new)], dim=1))[:, 13:-1]
    logits[..., 0] = -1e3  # padding, for which some families count no position
    best = logits.max(dim=-1).values - logits.gather(2, torch.tensor(new)[..., None])[..., 0]
    assert float(best.max()) < TOLERANCE * float(logits[..., 1:].abs().max()), "greedy"


KNOWN = ["gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2"]


@pytest.mark.parametrize("family", KNOWN)
def test_both_kinds_of_blocks_give_the_same_tokens_whatever_the_strategy(family: str) -> None:
    theirs, ours = known(family)
    native = lamina.from_transformers(theirs)
    rows = [[*random_ids(1, 5, 50)[0].tolist()] * 4, random_ids(1, 7, 50, seed=1)[0].tolist()]
    how: dict[str, Any] = dict(do_sample=False, eos_token_id=())
    expected = native.generate(rows, 10, **how).tokens
    prompt = torch.tensor(rows[:1])
    mask, more = torch.ones_like(prompt), dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert theirs.generate(prompt, attention_mask=mask, **more)[0, 20:].tolist() == expected[0]
    assert ours.generate(rows, 10, **how).tokens == expected
    assert ours.generate(rows, 10, prompt_lookup_num_tokens=3, **how).tokens == expected
    assert ours.generate(rows, 10, assistant_model=native, **how).tokens == expected
    assert native.generate(rows, 10, assistant_model=ours, **how).tokens == expected
    assert ours.generate(rows, 10, cache=ours.new_cache(2, residence="host"), **how).tokens == expected
    assert ours.generate(rows, 10, cache=ours.new_cache(2, pool=lamina.Pool(ours)), **how).tokens == expected
    store = lamina.PrefixStore(ours, 1 << 24)
    for _ in range(2):
        assert ours.generate(rows, 10, prefixes=store, **how).tokens == expected
    assert (
        ours.generate(rows[:1], 6, num_beams=3, **how).tokens == native.generate(rows[:1], 6, num_beams=3, **how).tokens
    )


@pytest.mark.parametrize(("family", "length"), [("gemma2", 18), ("falcon_h1", 9)])
def test_verify_passes(family: str, length: int) -> None:
    report = lamina.verify(known(family)[1], rows=2, tries=1, progress=False, length=length)
    assert report.ok, str(report)


def test_verify_passes_for_a_family_that_lamina_does_not_have() -> None:
    report = lamina.verify(other("gpt_neox_japanese")[1], rows=2, length=12, tries=1, progress=False)
    assert report.ok, str(report)


def test_windows_become_rings_where_the_models_own_mask_is_one() -> None:
    assert kinds(known("mistral")[1]) == {"attention, sliding 7"}
    assert kinds(known("gemma2")[1]) == {"attention, sliding 8", "attention"}
    assert kinds(known("falcon_h1")[1]) == {"attention", "state"}
    assert kinds(other("vaultgemma")[1]) == {"attention, sliding 6", "attention"}
    assert not reaches(lambda row, head, q, kv: (kv <= q) & (kv > q - 6), 6)
    assert reaches(lambda row, head, q, kv: (kv <= q) & (kv > q - 6), 5)
    assert reaches(lambda row, head, q, kv: kv <= q, 6)


def test_a_state_is_kept_for_every_token_within_the_slack() -> None:
    ours = known("mamba2")[1]
    ids, other_ids = random_ids(2, 12, 60), random_ids(2, 3, 60, seed=1)
    expected = ours(ids)
    cache = ours.new_cache(2, slack=3)
    ours(ids[:, :9], cache=cache)
    for back in ([3, 1], [0, 3], [2, 2]):
        counts = [back[0], back[1]]
        ours(other_ids, cache=cache, counts=counts)
        cache.rewind(counts).poison()
    found = ours(ids[:, 9:], cache=cache)
    assert expected is not None and found is not None and relative(found, expected[:, 9:]) < TOLERANCE
    with pytest.raises(RewindError, match="row 0 cannot be rewound by 4"):
        cache.rewind(4)


def test_a_partly_accepted_pass_is_as_if_only_those_tokens_were_given() -> None:
    for family in ("qwen3_next", "mamba2"):
        ours = known(family)[1]
        ids = random_ids(3, 16, 60)
        expected = ours(ids)
        cache = ours.new_cache(3)
        ours(ids[:, :4], cache=cache)
        step = cache.step(6)
        ours.forward(random_ids(3, 6, 60, seed=4).index_copy(1, torch.arange(2), ids[:, 4:6]), step)
        step.commit([2, 1, 0])
        for row, start in enumerate((6, 5, 4)):
            found = ours(ids[row : row + 1, start:], cache=cache.select([row]))
            assert expected is not None and found is not None
            assert relative(found, expected[row : row + 1, start:]) < TOLERANCE, (family, row)


def test_a_cache_file_continues_with_the_same_bits(tmp_path: Path) -> None:
    ours = known("qwen3_next")[1]
    cache = ours.new_cache(2, slack=2)
    ours(random_ids(2, 9, 60), cache=cache, counts=[9, 4])
    cache.save(tmp_path / "rows.cache")
    loaded, ids = lamina.load_cache(tmp_path / "rows.cache", ours), random_ids(2, 3, 60, seed=1)
    found = ours(ids, cache=loaded)
    assert found is not None and torch.equal(found, ours(ids, cache=cache))  # type: ignore[arg-type]


def test_codecs_store_what_they_store_with_lamina_s_own_blocks() -> None:
    theirs, ours = known("qwen3_next")
    native, ids = lamina.from_transformers(theirs), random_ids(2, 12, 60)
    caches = [model.new_cache(2, codec="k8v4") for model in (ours, native)]
    for part in ids.split([7, 1, 4], dim=1):
        a, b = (model(part, cache=cache) for model, cache in zip((ours, native), caches, strict=True))
        assert a is not None and b is not None and relative(a, b) < 1e-3


def test_embeddings_and_packed_segments() -> None:
    ours = known("mistral")[1]
    ids = random_ids(1, 20, 60)
    expected, embeds = ours(ids), ours.embed(ids)
    assert torch.equal(ours(embeds=embeds), expected)  # type: ignore[arg-type]
    embeds[0, 3] += 1  # it is not what its ids say any more
    changed = ours(embeds=embeds)
    assert changed is not None and expected is not None
    assert relative(changed[:, :3], expected[:, :3]) < TOLERANCE and relative(changed, expected) > 0.01
    packed, alone = ours(ids, segments=torch.tensor([[0] * 8 + [1] * 12])), ours(ids[:, 8:])
    assert packed is not None and alone is not None and relative(packed[:, 8:], alone) < TOLERANCE
    with pytest.raises(InputError, match="packed segments need a model that takes positions"):
        known("mamba2")[1](ids, segments=torch.zeros_like(ids))


def test_the_transformers_model_is_as_before_between_passes() -> None:
    theirs, ours = known("gemma2")
    ids = random_ids(1, 9, 60)
    assert theirs.config._attn_implementation == "eager"
    before = truth(theirs, ids)
    ours(ids, cache=ours.new_cache(1))
    assert theirs.config._attn_implementation == "eager" and "forward" not in vars(theirs.model)
    assert torch.equal(truth(theirs, ids), before)


def test_explain_says_why_nothing_is_captured_and_compile_is_refused() -> None:
    ours = known("mistral")[1]
    assert "its blocks are those of transformers, for which Lamina has no kernels" in ours.explain()
    with pytest.raises(InputError, match="MistralForCausalLM has blocks of transformers"):
        ours.compile()


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "llama4"])
def test_attentions_of_ragged_rows_are_those_of_each_row_alone(family: str) -> None:
    ours, rows = known(family)[1], [[5, 9, 12, 3], [7], [30, 31, 32, 33]]
    asked = dict(max_new_tokens=3, eos_token_id=(), output_attentions=True, output_hidden_states=True)
    together = ours.generate(rows, **asked)
    for row, ids in enumerate(rows):
        alone = ours.generate([ids], **asked)
        assert together.attentions[row].keys() == alone.attentions[0].keys() != set()
        for key, weights in together.attentions[row].items():
            torch.testing.assert_close(weights, alone.attentions[0][key], rtol=1e-4, atol=1e-5)
        for found, expected in zip(together.hidden_states[row], alone.hidden_states[0], strict=True):
            assert relative(found, expected) < TOLERANCE


def test_spans_of_rows_that_run_by_several_calls_are_seen_and_one_that_would_be_cut_is_refused() -> None:
    ours, ids, spans = known("qwen3_next")[1], random_ids(2, 10, 60), torch.full((2, 10), -1)
    spans[0, 2:5], spans[1, 1:4] = 0, 0
    expected = [ours(ids[:1], spans=spans[:1]), ours(ids[1:, :7], spans=spans[1:, :7])]
    for slack in (0, 3):
        found = ours(ids, counts=[10, 7], cache=ours.new_cache(2, slack=slack), spans=spans)
        assert relative(found[:1], expected[0]) < TOLERANCE and relative(found[1:, :7], expected[1]) < TOLERANCE
    cache = ours.new_cache(2, slack=8)
    with pytest.raises(InputError, match=r"row 0 has a span at tokens 2 and 3, which .* runs in two calls"):
        ours(ids, counts=[10, 7], cache=cache, spans=spans)
    assert cache.lengths.tolist() == [0, 0]


def test_what_needs_several_blocks_or_a_head_is_refused_by_name() -> None:
    ours = known("llama4")[1]
    with pytest.raises(InputError, match="dola_layers: TransformersModel has no `head`"):
        ours.generate([[5]], 2, dola_layers="low")
    with pytest.raises(InputError, match="assistant_early_exit=1: TransformersModel is a single block"):
        ours.generate([[5]], 2, assistant_early_exit=1)


def test_load_via_transformers(tmp_path: Path) -> None:
    theirs, _ = other("persimmon")
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r'persimmon.*lamina\.load\(path, via="transformers"\)'):
        lamina.load(tmp_path)
    ours = lamina.load(tmp_path, device="cpu", via="transformers")
    ids = random_ids(1, 9, 60)
    found = ours(ids)
    assert found is not None and relative(found, truth(theirs, ids)) < TOLERANCE
    assert lamina.load(tmp_path, "bfloat16", "cpu", via="transformers").dtype == torch.bfloat16
    with pytest.raises(InputError, match="via='onnx': it must be"):
        lamina.load(tmp_path, via="onnx")
    with pytest.raises(InputError, match="context=512: transformers' own blocks"):
        lamina.load(tmp_path, via="transformers", context=512)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CheckpointError, match="is not a folder"):
        lamina.load(tmp_path / "a.gguf", via="transformers")


def test_what_does_not_run_is_refused_by_name() -> None:
    pair = BartForConditionalGeneration(PAIRS["bart"]["plain"]()).eval()
    with pytest.raises(InputError, match="BartForConditionalGeneration is an encoder–decoder model"):
        lamina.from_transformers(pair, via="transformers")
    own_cache = AutoModelForCausalLM.from_config(next(iter(CASES["minimax"].values()))()).eval()
    with pytest.raises(InputError, match="MiniMaxForCausalLM does not run with transformers' DynamicCache"):
        lamina.from_transformers(own_cache, via="transformers")
    no_cache = AutoModelForCausalLM.from_config(next(iter(CASES["openai-gpt"].values()))()).eval()
    with pytest.raises(InputError, match=r"OpenAIGPTLMHeadModel takes no cache \(past_key_values\)"):
        lamina.from_transformers(no_cache, via="transformers")


def test_a_model_that_reads_more_of_its_cache_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = LlamaForCausalLM(make()).eval()
    attention = type(theirs.model.layers[0].self_attn)
    right = attention.forward

    def curious(self: Any, *args: Any, past_key_values: Any = None, **more: Any) -> Any:
        if past_key_values is not None and "DynamicCache" not in type(past_key_values).__name__:
            past_key_values.layers[self.layer_idx].secret_states  # noqa: B018
        return right(self, *args, past_key_values=past_key_values, **more)

    monkeypatch.setattr(attention, "forward", curious)
    with pytest.raises(InputError, match=r"LlamaForCausalLM does not run over Lamina's caches: AttributeError.*secret"):
        lamina.from_transformers(theirs, via="transformers")


def test_a_model_whose_cached_passes_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = LlamaForCausalLM(make()).eval()
    attention = type(theirs.model.layers[0].self_attn)
    right = attention.forward

    def forgetful(self: Any, hidden_states: Any, *args: Any, past_key_values: Any = None, **more: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            hidden_states = hidden_states * 0.5
        return right(self, hidden_states, *args, past_key_values=past_key_values, **more)

    monkeypatch.setattr(attention, "forward", forgetful)
    with pytest.raises(InputError, match="does not run over Lamina's caches: logits differ by"):
        lamina.from_transformers(theirs, via="transformers")
