"""`lamina.from_transformers`: the same logits from the same memory, for every family; what cannot be shared is told."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import lamina
from lamina import CheckpointError, InputError
from tests.families.cases import CASES
from tests.families.cases.llama import make
from tests.families.encoder_decoder_cases import FAMILIES as PAIRS
from tests.families.encoder_decoder_cases import T5_SIZES
from tests.families.harness import TOLERANCE, WRONG_IN_EAGER, random_ids, relative

WRONG = {"roformer", "minimax_m2"} if transformers.__version__.startswith("5.17.") else set()
"""Families that transformers itself computes wrongly: 5.17's RoFormer is not causal, its MiniMax M2 rotates all."""
REGROUPED = {
    "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "llama4", "minimax", "openai-gpt",
    "recurrent_gemma", "zamba",
}  # fmt: skip
"""Families of which transformers stores some matrices transposed, or with the rows in another order. What else is
converted is computed: the A of Mamba is -exp(A_log)."""


def first(family: str) -> Any:
    """A random model of transformers in float32."""
    torch.manual_seed(0)
    auto, made = (AutoModelForSeq2SeqLM, PAIRS) if family in PAIRS else (AutoModelForCausalLM, CASES)
    attention = "sdpa" if family in WRONG_IN_EAGER else "eager"
    config = next(iter(made[family].values()))()
    return auto.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(make()).eval()


def memory(module: torch.nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in module.state_dict().values()}


@torch.no_grad()
@pytest.mark.parametrize("family", [*CASES, *PAIRS])
def test_logits_are_those_of_transformers_and_only_merged_or_regrouped_weights_are_copied(family: str) -> None:
    theirs = first(family)
    ours = lamina.from_transformers(theirs)
    ids = random_ids(2, 9, 60) + 3
    if family in PAIRS:
        truth = theirs(input_ids=ids, decoder_input_ids=ids[:, :5], use_cache=False).logits
        found = ours(ids[:, :5], source=ours.encode(ids))
    else:
        truth, found = theirs(ids, use_cache=False).logits, ours(ids)
    assert found is not None
    assert family in WRONG or relative(found, truth) < TOLERANCE

    kept, own = memory(theirs), dict(ours.state_dict())
    assert {path for path, how in ours.sharing.parameters.items() if how == "shared"} == {
        path for path, tensor in own.items() if path in ours.sharing.parameters and
        tensor.untyped_storage().data_ptr() in kept
    }  # fmt: skip
    once = {tensor.data_ptr(): tensor for path, tensor in own.items() if path in ours.sharing.parameters}.values()
    assert ours.sharing.copied == sum(one.nbytes for one in once if one.untyped_storage().data_ptr() not in kept)
    converted = [path for path, how in ours.sharing.parameters.items() if how == "converted"]
    matrices = [path for path in converted if own[path].ndim > 1 and not path.endswith(".A")]
    assert bool(matrices) == (family in REGROUPED)


def test_experts_are_shared_though_checkpoints_hold_them_one_by_one() -> None:
    for family in ("mixtral", "deepseek_v3", "qwen3_moe"):
        ours = lamina.from_transformers(first(family))
        experts = {how for path, how in ours.sharing.parameters.items() if ".experts." in path}
        assert experts == {"shared"}, family


@torch.no_grad()
def test_a_shared_weight_that_is_changed_in_place_changes_both_models() -> None:
    theirs = llama()
    ours = lamina.from_transformers(theirs)
    ids = random_ids(1, 6, ours.vocab)
    before = ours(ids)
    theirs.model.norm.weight.mul_(2)
    theirs.model.layers[0].self_attn.o_proj.weight.add_(0.1)
    found = ours(ids)
    assert found is not None and before is not None
    assert relative(found, before) > 0.1
    assert relative(found, theirs(ids).logits) < TOLERANCE


def test_weights_outlive_the_model_they_came_from() -> None:
    theirs = llama()
    ids = random_ids(1, 6, 60)
    with torch.no_grad():
        truth = theirs(ids).logits
    ours = lamina.from_transformers(theirs)
    del theirs
    gc.collect()
    found = ours(ids)
    assert found is not None and relative(found, truth) < TOLERANCE


def test_tied_weights_stay_tied() -> None:
    theirs = LlamaForCausalLM(make(tie_word_embeddings=True)).eval()
    ours = lamina.from_transformers(theirs)
    assert ours.head.weight is ours.embedding.weight  # type: ignore[union-attr]
    assert ours.head.weight.data_ptr() == theirs.lm_head.weight.data_ptr()  # type: ignore[union-attr, operator]
    theirs = LlamaForCausalLM(make(tie_word_embeddings=True)).eval()
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))  # the configuration is wrong
    ids = random_ids(1, 6, 60)
    with torch.no_grad():
        truth = theirs(ids).logits
    found = lamina.from_transformers(theirs)(ids)
    assert found is not None and relative(found, truth) < TOLERANCE


def test_dtype_settings_and_tokenizer_come_along() -> None:
    theirs = llama().to(torch.bfloat16)
    theirs.generation_config.temperature, theirs.generation_config.eos_token_id = 0.7, [3, 4]
    ours = lamina.from_transformers(theirs)
    assert ours.dtype == torch.bfloat16 and not ours.training and ours.tokenizer is None
    assert ours.generation_defaults["temperature"] == 0.7 and ours.eos_ids == (3, 4)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert all(parameter.requires_grad for parameter in theirs.parameters())


def test_the_sharing_is_told_in_one_line() -> None:
    ours = lamina.from_transformers(llama())
    assert str(ours.sharing) == "37.4 KiB shared, 40.0 KiB copied (merged 40.0 KiB)"


def test_generate_gives_the_tokens_of_transformers() -> None:
    theirs = llama()
    ids = random_ids(1, 7, 60) + 3  # 0 is padding to transformers
    truth = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 7:].tolist()
    ours = lamina.from_transformers(theirs)
    assert ours.generate(ids.tolist(), 12, do_sample=False, eos_token_id=()).tokens[0] == truth


@torch.no_grad()
def test_of_a_multimodal_model_the_text_part_is_taken() -> None:
    torch.manual_seed(0)
    text = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=67, sliding_window=5,
    )  # fmt: skip
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    theirs = Gemma3ForConditionalGeneration(config).eval()
    ours = lamina.from_transformers(theirs)
    ids = random_ids(2, 12, 60)
    found = ours(ids)
    assert found is not None and relative(found, theirs(ids, use_cache=False).logits) < TOLERANCE


@torch.no_grad()
def test_t5_and_whisper() -> None:
    torch.manual_seed(0)
    theirs: Any = AutoModelForSeq2SeqLM.from_config(T5Config(**T5_SIZES)).eval()
    ids = random_ids(2, 9, 60) + 3
    ours: Any = lamina.from_transformers(theirs)
    truth = theirs(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
    assert relative(ours(ids[:, :5], source=ours.encode(ids)), truth) < TOLERANCE
    config = WhisperConfig(
        vocab_size=160, num_mel_bins=80, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=40, max_source_positions=50,
        max_target_positions=64, decoder_start_token_id=91, pad_token_id=90, bos_token_id=90, eos_token_id=90,
    )  # fmt: skip
    theirs, features = WhisperForConditionalGeneration(config).eval(), torch.randn(2, 80, 100)
    ours = lamina.from_transformers(theirs)
    truth = theirs(input_features=features, decoder_input_ids=ids).logits
    assert relative(ours(ids, source=ours.encode(features=features)), truth) < TOLERANCE


def test_a_model_that_was_loaded_by_transformers_is_shared_too(tmp_path: Path) -> None:
    theirs = first("mixtral")
    theirs.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 9, 60)
    with torch.no_grad():
        truth = theirs(ids).logits
    found = lamina.from_transformers(theirs)(ids)
    assert found is not None and relative(found, truth) < TOLERANCE


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    theirs = llama()
    with pytest.raises(InputError, match=r"LlamaForCausalLM is in training mode.*eval\(\)"):
        lamina.from_transformers(theirs.train())
    theirs.eval().is_quantized = True
    with pytest.raises(InputError, match="LlamaForCausalLM has weights quantized with 'a quantizer'"):
        lamina.from_transformers(theirs)
    theirs.is_quantized = False
    theirs._hf_peft_config_loaded = True
    with pytest.raises(InputError, match="PEFT adapters: merge them"):
        lamina.from_transformers(theirs)
    theirs._hf_peft_config_loaded = False
    theirs.hf_device_map = {"model.layers.0": 0, "model.layers.1": "disk"}
    with pytest.raises(InputError, match=r"weights without memory \(0, cpu, disk\)"):
        lamina.from_transformers(theirs)
    theirs.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(InputError, match="spread over 0, 1, cpu"):
        lamina.from_transformers(theirs)
    with pytest.raises(InputError, match="LlamaModel has no language-model head"):
        lamina.from_transformers(LlamaModel(make()).eval())
    with torch.device("meta"), pytest.raises(InputError, match=r"weights without memory \(meta\)"):
        lamina.from_transformers(LlamaForCausalLM(make()).eval())
    with pytest.raises(InputError, match="hf_model is a Linear; it must be a transformers model"):
        lamina.from_transformers(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_lamina_is_imported_without_transformers() -> None:
    code = "import sys, lamina; lamina.from_transformers, lamina.load; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_weights_that_do_not_fit_the_configuration_are_refused() -> None:
    theirs = llama()
    theirs.model.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"1|2 unexpected: model\.layers\.0\.extra"):
        lamina.from_transformers(theirs)
