"""A family of each kind over packed weights: the logits of the dequantized model, and the laws of the cache."""

from __future__ import annotations

import copy
import io
import pickle
from threading import Thread

import pytest
import torch
from torch import nn

import lamina
from lamina.bench.random_model import random_model
from lamina.checkpoint import Tokenizer
from lamina.generation.prefix_store import PrefixStore
from lamina.weights import Packed, PackedWeight, named_weights, packed_formats
from lamina.weights.quantize import quantize_weights
from tests.checkpoint.test_gguf_tokenizer import BACKEND
from tests.families.cases import cases
from tests.families.harness import relative

LLAMA = dict(
    model_type="llama", vocab_size=60, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip
MIXTURE = dict(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1, norm_topk_prob=True
)
CONFIGS = {
    "dense": LLAMA,
    "mixture": LLAMA | MIXTURE | dict(model_type="qwen3_moe", head_dim=16),
    "recurrent": dict(
        model_type="mamba2", vocab_size=60, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=8,
        head_dim=16, n_groups=2, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5, tie_word_embeddings=True,
    ),
    "latent": LLAMA | dict(
        model_type="deepseek_v3", q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
        tie_word_embeddings=False,
    ),
    "sliding": LLAMA | dict(model_type="mistral", sliding_window=6, head_dim=16),
    "hybrid": LLAMA | dict(
        model_type="falcon_h1", head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
        mamba_n_groups=1, mamba_d_conv=4, mamba_expand=1, tie_word_embeddings=False,
    ),
    "encoder–decoder": dict(
        model_type="t5", vocab_size=60, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def packed_model(kind: str, weights: str = "int4") -> lamina.Model:
    model = random_model(CONFIGS[kind], torch.float32, "cpu")
    quantize_weights(model, weights)
    return model


def dequantized(model: lamina.Model) -> lamina.Model:
    """The same model with plain weights of the same values."""
    plain, made = copy.deepcopy(model), {}
    for module in list(plain.modules()):
        for name, child in list(module._modules.items()):
            if isinstance(child, Packed) and not isinstance(module, Packed | nn.ModuleList):
                delattr(module, name)
                made.setdefault(child, nn.Parameter(child.dense(), requires_grad=False))  # one for both if it is tied
                setattr(module, name, made[child])
    return plain


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_logits_are_those_of_the_dequantized_model_and_the_laws_hold(kind):
    model = packed_model(kind)
    plain = dequantized(model)
    assert {"int4, groups of 32", "int8, groups of 32"} == set(packed_formats(model)) and not packed_formats(plain)
    assert [name for name, _ in named_weights(model)] == [name for name, _ in named_weights(plain)]
    given = {} if kind != "encoder–decoder" else {"source": model.random_source(1, 5)}
    rounded, wanted = model(IDS, **given), plain(IDS, **given)
    model.activations = "float32"
    assert relative(model(IDS, **given), wanted) < 1e-5 < relative(rounded, wanted) < 0.05
    model.activations = "int8"
    report = lamina.verify(model, rows=2, length=12, tries=1, laws=["chunking", "rewind", "acceptance", "file"])
    assert report.ok, str(report)
    assert "products with packed weights took float32 activations" in str(report) and model.activations == "int8"


@torch.no_grad()
def test_only_chosen_experts_are_dequantized(monkeypatch):
    model, seen, entry = packed_model("mixture"), [], PackedWeight.entry
    monkeypatch.setattr(PackedWeight, "entry", lambda self, index: seen.append(index) or entry(self, index))
    model(IDS[:, :1])
    assert len(seen) == 2 * 2 * 2  # layers, matrices, experts of the one token


def test_speculation_prefix_stores_and_files_work_over_packed_weights(tmp_path):
    model = packed_model("dense")
    plain, prompt = dequantized(model), IDS[0].tolist() * 3
    wanted = plain.generate([prompt], 12, do_sample=False).tokens
    assert model.generate([prompt], 12, do_sample=False).tokens == wanted
    assert model.generate([prompt], 12, do_sample=False, prompt_lookup_num_tokens=3).tokens == wanted
    assert model.generate([prompt], 12, do_sample=False, assistant_model=plain).tokens == wanted
    store = PrefixStore(model, 1 << 20)
    for _ in range(2):
        found = model.generate([prompt], 12, do_sample=False, prefixes=store)
        assert found.tokens == wanted
    assert found.reused[0] >= len(prompt) - 1
    cache = model.new_cache(1, codec="int8")
    model(IDS, cache=cache)
    cache.save(tmp_path / "cache")
    assert lamina.load_cache(tmp_path / "cache", plain).tokens[0] == IDS[0].tolist()  # the same weights
    other = packed_model("dense", "int8")
    with pytest.raises(lamina.CacheFileError, match="with other weights, of which"):
        lamina.load_cache(tmp_path / "cache", other)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_copies_and_pickles_of_a_packed_model_and_threads_of_it_give_the_same_tokens(weights):
    model = random_model(LLAMA | dict(vocab_size=BACKEND.get_vocab_size()), torch.float32, "cpu")
    quantize_weights(model, weights)
    model.tokenizer = Tokenizer(BACKEND)

    def tokens(one):
        return one.generate([IDS[0].tolist()], 8, do_sample=False).tokens

    wanted, file = tokens(model), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = pickle.loads(pickle.dumps(model))
    for one in (copy.deepcopy(model), again, torch.load(file, weights_only=False)):
        assert tokens(one) == wanted and packed_formats(one) == packed_formats(model)
        assert one.tokenizer.same_ids(model.tokenizer)
    found, threads = [], [Thread(target=lambda: found.append(tokens(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4


def test_a_packed_model_says_how_it_runs_and_what_it_cannot():
    model = packed_model("dense")
    text = model.explain()
    assert text.startswith("decoding: one native program a step")
    assert "packed weights: int8, groups of 32 (1), int4, groups of 32 (8); products on cpu by native kernels" in text
    with pytest.raises(lamina.InputError, match="compile is for plain weights"):
        model.compile()
    with pytest.raises(lamina.InputError, match="the weights of this model are packed"):
        lamina.export(model)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_plan_rehearses_a_packed_model_on_the_meta_device(weights):
    found = lamina.plan(packed_model("dense", weights), length=32)
    assert found.scratch is not None and found.scratch > 0


def test_a_plan_of_a_packed_model_has_its_bytes_and_scratch():
    model = packed_model("mixture")
    found = lamina.plan(model, length=32)
    assert found.weights < lamina.plan(dequantized(model), length=32).weights / 2
    assert found.scratch is not None and found.scratch > 0 and found.moved is not None
    assert found.moved.weights < found.weights  # of the experts and the embedding only a part is read
    assert lamina.plan(CONFIGS["mixture"], length=32, weights="int4").weights == found.weights


def test_a_model_whose_first_plain_parameter_is_float32_has_the_dtype_of_its_packed_weights() -> None:
    config = next(iter(cases("qwen3_next").values()))().to_dict()
    model = random_model(config, torch.bfloat16, "cpu")
    quantize_weights(model, "int8")
    assert next(model.parameters()).dtype == torch.float32  # the decays of its recurrence
    assert model.dtype == torch.bfloat16
    result = model.generate([[3, 1, 4], [5]], max_new_tokens=3, eos_token_id=())
    assert [len(row) for row in result.tokens] == [3, 3]
