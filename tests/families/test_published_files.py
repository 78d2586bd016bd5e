"""Config options that a family refuses, and tensor names in published checkpoints that transformers does not write."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig, MptConfig
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

import lamina
from lamina.config import Config
from lamina.errors import InputError
from lamina.models import family
from lamina.nn import Rotary, alibi_slopes
from tests.families.cases import cases, dense_b
from tests.families.cases.dense_b import BLOOM, FALCON, GPT, MPT, NEO, OPT, SIZES, XGLM
from tests.families.harness import TOLERANCE, pair, random_ids, relative, truth
from tests.families.test_published_configs import built

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", dict(add_cross_attention=True), "add_cross_attention=True"),
    ("gpt_bigcode", dict(add_cross_attention=True), "add_cross_attention=True"),
    ("gpt_neo", dict(attention_layers=["local", "dilated"]), "attention_layers="),
    ("openai-gpt", dict(afn="tanh"), "afn='tanh'"),
    ("gptj", dict(rotary_dim=None), "rotary_dim=None"),
    ("gptj", dict(rotary_dim=10), "rotary_dim=10"),
    ("xglm", dict(add_cross_attention=True), "add_cross_attention=True"),
    ("falcon", dict(new_decoder_architecture=True, parallel_attn=False), "parallel_attn=False"),
    ("falcon", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn=2"),
    ("falcon", dict(apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm=True"),
    ("bloom", dict(pretraining_tp=2, slow_but_exact=True), "slow_but_exact=True"),
    ("mpt", dict(no_bias=False), "no_bias=False"),
    ("mpt", dict(expansion_ratio=2), "expansion_ratio=2"),
    ("mpt", dict(logit_scale="inv_sqrt_d_model"), "logit_scale='inv_sqrt_d_model'"),
    ("mpt", dict(attn_config=dict(attn_type="multiquery_attention")), "attn_type='multiquery_attention'"),
    ("mpt", dict(attn_config=dict(alibi=False)), "alibi=False"),
    ("mpt", dict(attn_config=dict(qk_ln=True)), "qk_ln=True"),
    ("mpt", dict(attn_config=dict(prefix_lm=True)), "prefix_lm=True"),
    ("starcoder2", dict(norm_type="rms_norm"), "norm_type='rms_norm'"),
    ("hunyuan_v1_dense", dict(use_cla=True), "use_cla=True"),
    ("hunyuan_v1_dense", dict(use_qk_norm=False), "use_qk_norm=False"),
    ("doge", dict(is_moe=True), "is_moe=True"),
    ("roformer", dict(is_decoder=False), "is_decoder=False"),
    ("roformer", dict(rotary_value=True), "rotary_value=True"),
    ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers="),
]


@pytest.mark.parametrize(("name", "changes", "said"), REFUSED, ids=[f"{name} {said}" for name, _, said in REFUSED])
def test_an_option_that_is_not_implemented_is_refused_by_name(name: str, changes: dict[str, Any], said: str) -> None:
    config = next(iter(cases(name).values()))().to_dict() | changes
    with torch.device("meta"), pytest.raises(InputError, match=said.replace("[", r"\[")):
        family(name).build(Config(config))


def bare(prefix: str) -> Callable[[str], str]:
    return lambda name: name.removeprefix(prefix)


PUBLISHED: list[tuple[str, Callable[[str], str], list[str]]] = [
    ("gpt2", bare("transformer."), ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    (
        "gpt_neo",
        lambda name: name,
        ["transformer.h.0.attn.attention.bias", "transformer.h.1.attn.attention.masked_bias"],
    ),
    ("openai-gpt", bare("transformer."), ["h.0.attn.bias"]),
    ("gptj", lambda name: name, ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
    (
        "gpt_neox",
        lambda name: name.replace("lm_head", "embed_out"),
        ["gpt_neox.layers.0.attention.rotary_emb.inv_freq", "gpt_neox.layers.0.attention.bias"],
    ),
    ("opt", bare("model."), []),
    ("bloom", bare("transformer."), []),
    ("xglm", lambda name: name, ["model.embed_positions.weights"]),
    ("stablelm", lambda name: name, ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
]


@pytest.mark.parametrize(("name", "rename", "more"), PUBLISHED, ids=[name for name, *_ in PUBLISHED])
def test_tensor_names_of_published_files_load(name: str, rename: Callable[[str], str], more: list[str]) -> None:
    theirs, ours = pair(name, next(iter(cases(name))))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        save_file(
            {rename(key): value for key, value in load_file(path).items()} | {key: torch.ones(2) for key in more}, path
        )
        loaded = lamina.load(folder, device="cpu")
    ids = random_ids(1, 5, ours.vocab)
    assert torch.equal(loaded(ids), ours(ids))


FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_neox", "rope_parameters", dict(rotary_pct=0.5, rotary_emb_base=10_000)),
    ("falcon", "rope_parameters", dict(rope_theta=10_000.0)),
    ("bloom", "hidden_size", dict(n_embed=32)),
    ("glm", "rope_parameters", dict(partial_rotary_factor=0.5, rope_theta=10_000.0)),
]


@pytest.mark.parametrize(("name", "now", "before"), FIELDS, ids=[name for name, *_ in FIELDS])
def test_fields_under_their_old_names_are_read(name: str, now: str, before: dict[str, Any]) -> None:
    theirs, ours = pair(name, next(iter(cases(name))))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        path = Path(folder) / "config.json"
        values = json.loads(path.read_text())
        del values[now]
        path.write_text(json.dumps(values | before))
        loaded = lamina.load(folder, device="cpu")
    ids = random_ids(1, 5, ours.vocab)
    assert torch.equal(loaded(ids), ours(ids))


NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt"), GPT),
    **dict.fromkeys(("gptj", "codegen"), GPT | dict(n_embd=256)),  # heads must have 64 dimensions to rotate
    "gpt_neo": NEO | dict(num_layers=24),
    "opt": OPT,
    "xglm": XGLM,
    "falcon": FALCON,
    "bloom": BLOOM,
    "mpt": MPT,
}
"""The fields that every file has, of families whose names for them are not Llama's."""


@pytest.mark.parametrize("name", dense_b.FAMILIES)
def test_fields_that_a_file_lacks_have_the_defaults_of_transformers(name: str) -> None:
    changes = {"is_decoder": True} if name == "roformer" else {}
    values = {
        "model_type": name,
        **NEEDED.get(name, SIZES | {"hidden_size": 2560, "num_attention_heads": 160}),
        **changes,
    }
    full = AutoConfig.for_model(**values).to_dict()
    ours, theirs = built(values), built(full)
    assert ours.specs == theirs.specs and ours.context == theirs.context
    assert described(ours) == described(theirs)
    assert (ours.head.weight is ours.embedding.weight) == (theirs.head.weight is theirs.embedding.weight)


def described(model: Any) -> dict[str, Any]:
    """Shapes of parameters and plain attributes of modules, by path; frequencies of RoPE."""
    found: dict[str, Any] = {path: one.shape for path, one in model.named_parameters()}
    for path, module in model.named_modules():
        found |= {
            f"{path}.{key}": value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not key.startswith("_")
        }
        if isinstance(module, Rotary):
            found[path] = module.frequencies.tolist()
        if hasattr(module, "act"):
            found[f"{path}.act"] = str(module.act)
    return found


@pytest.mark.parametrize("name", dense_b.FAMILIES)
def test_every_field_that_transformers_writes_is_read(name: str) -> None:
    for case, options in cases(name).items():
        config = Config(json.loads(options().to_json_string()))
        with torch.device("meta"):
            model = family(name).build(config)
        model.context  # noqa: B018  which reads the number of positions
        assert set(config.unread) <= {"model_type"}, case


@pytest.mark.parametrize("name", [name for name in cases("falcon") if "ALiBi" in name])
def test_eager_falcon_of_transformers_adds_alibi_twice(name: str) -> None:
    """In the mask, and to the scores. So the truth for Falcon is its sdpa path."""
    sdpa, ours = pair("falcon", name)
    eager = AutoModelForCausalLM.from_config(
        cases("falcon")[name](), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    eager.load_state_dict(sdpa.state_dict())
    ids = random_ids(1, 30, ours.vocab)
    expected = truth(eager, ids)
    assert relative(ours(ids), expected) > 100 * TOLERANCE
    twice = copy.deepcopy(ours)
    twice.alibi.slopes *= 2  # type: ignore[operator, union-attr]
    assert relative(twice(ids), expected) < TOLERANCE


def test_falcon_of_transformers_rounds_alibi_to_bfloat16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slopes of 16 heads are no powers of two: with exact products its logits are ours, with its own they are not."""
    torch.manual_seed(0)
    config = FalconConfig(**FALCON | dict(hidden_size=64, num_attention_heads=16, alibi=True, initializer_range=0.2))
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = lamina.load(tmp_path, device="cpu"), random_ids(1, 60, 67)
    assert relative(ours(ids), truth(theirs, ids)) > 2 * TOLERANCE

    def exact(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(alibi_slopes(heads))[:, None, None] * torch.arange(mask.shape[1])

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE


def test_mpt_of_transformers_ignores_alibi_bias_max(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MPT-7B-StoryWriter has 16. If transformers is made to use that, its logits are ours."""
    torch.manual_seed(0)
    config = MptConfig(**MPT | dict(attn_config=dict(alibi_bias_max=16), initializer_range=0.2))
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path)
    ours, ids = lamina.load(tmp_path, device="cpu"), random_ids(1, 40, 67)
    assert relative(ours(ids), truth(theirs, ids)) > 100 * TOLERANCE
    made = modeling_mpt.build_mpt_alibi_tensor
    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", lambda heads, n, _, device: made(heads, n, 16, device))
    assert relative(ours(ids), truth(theirs, ids)) < TOLERANCE
