"""`Mixture` against the mixture of each family in transformers: the table in `lamina/nn/moe/__init__.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lamina import InputError
from lamina.activation import Gating
from lamina.nn import MLP, Choice, Mixture

W, E, N, S = 12, 8, 6, 5  # width, experts, inner widths of an expert and of the shared one
GROUPED = dict(n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, n_routed_experts=E)


class Family(NamedTuple):
    block: str  # its class in transformers
    config: str
    options: dict[str, Any]  # of the config
    ours: Callable[[], Mixture]


def mixture(choice: Choice, experts: int = E, act: str | Gating = "silu", **options: Any) -> Mixture:
    return Mixture(W, experts, N, act, choice, **options)


def grouped(**options: Any) -> Callable[[], Mixture]:
    rule = Choice(3, "sigmoid", normed=True, factor=2.5, groups=4, groups_each=2)
    return lambda: mixture(rule, balanced=True, exact=True, **options)


def like_deepseek(block: str, config: str, **more: Any) -> Family:
    return Family(block, config, GROUPED | dict(moe_intermediate_size=N, n_shared_experts=1) | more, grouped(shared=N))


NORMED, PLAIN = Choice(3, normed=True), Choice(3)
FAMILIES = {
    "mixtral": Family(
        "MixtralSparseMoeBlock", "MixtralConfig",
        dict(num_local_experts=E, intermediate_size=N), lambda: mixture(NORMED),
    ),
    "minimax": Family(
        "MiniMaxSparseMoeBlock", "MiniMaxConfig",
        dict(num_local_experts=E, intermediate_size=N), lambda: mixture(NORMED),
    ),
    "qwen2_moe": Family(
        "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig",
        dict(num_experts=E, moe_intermediate_size=N, shared_expert_intermediate_size=S, norm_topk_prob=False),
        lambda: mixture(PLAIN, shared=S, opens=True),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeTextConfig",
        dict(num_experts=E, moe_intermediate_size=N, shared_expert_intermediate_size=S),
        lambda: mixture(NORMED, shared=S, opens=True),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", dict(num_experts=E, moe_intermediate_size=N, norm_topk_prob=True),
        lambda: mixture(NORMED),
    ),
    "olmoe": Family(
        "OlmoeSparseMoeBlock", "OlmoeConfig", dict(num_experts=E, intermediate_size=N), lambda: mixture(PLAIN)
    ),
    "flex_olmo": Family(
        "FlexOlmoSparseMoeBlock", "FlexOlmoConfig", dict(num_experts=E, intermediate_size=N), lambda: mixture(PLAIN)
    ),
    "phimoe": Family(
        "PhimoeSparseMoeBlock", "PhimoeConfig",
        dict(num_local_experts=E, intermediate_size=N, router_jitter_noise=0.4, num_experts_per_tok=2),
        lambda: mixture(Choice(2, "sparsemixer", jitter=0.4)),
    ),
    "granitemoe": Family(
        "GraniteMoeMoE", "GraniteMoeConfig", dict(num_local_experts=E, intermediate_size=N), lambda: mixture(NORMED)
    ),
    "afmoe": Family(
        "AfmoeSparseMoeBlock", "AfmoeConfig",
        dict(num_experts=E, moe_intermediate_size=N, num_shared_experts=2, route_scale=1.5),
        lambda: mixture(Choice(3, "sigmoid", normed=True, factor=1.5), balanced=True, shared=2 * N),
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig",
        dict(moe_num_experts=E, moe_intermediate_size=N, moe_num_shared_experts=1, moe_norm_min=0.8, moe_k=3),
        lambda: mixture(Choice(3, normed=True, least=0.8), balanced=True, exact=True, shared=N),
    ),
    "deepseek_v2": Family(
        "DeepseekV2Moe", "DeepseekV2Config",
        GROUPED | dict(moe_intermediate_size=N, n_shared_experts=1, num_attention_heads=2,
                       topk_method="group_limited_greedy"),
        lambda: mixture(Choice(3, factor=2.5, groups=4, groups_each=2, group_best=1), exact=True, shared=N),
    ),
    "deepseek_v3": like_deepseek("DeepseekV3MoE", "DeepseekV3Config"),
    "glm4_moe": like_deepseek("Glm4MoeMoE", "Glm4MoeConfig"),
    "glm4_moe_lite": like_deepseek("Glm4MoeLiteMoE", "Glm4MoeLiteConfig"),
    "dots1": like_deepseek("Dots1MoE", "Dots1Config"),
    "solar_open": like_deepseek("SolarOpenMoE", "SolarOpenConfig"),
    "kimi_linear": like_deepseek("KimiLinearMoE", "KimiLinearConfig", num_local_experts=E),
    "exaone_moe": like_deepseek("ExaoneMoeSparseMoEBlock", "ExaoneMoeConfig", num_experts=E, num_shared_experts=1),
    "mimo_v2_flash": Family(
        "MiMoV2FlashMoE", "MiMoV2FlashConfig", GROUPED | dict(moe_intermediate_size=N), grouped()
    ),
    "nemotron_h": Family(
        "NemotronHMoE", "NemotronHConfig",
        GROUPED | dict(moe_intermediate_size=N, moe_shared_expert_intermediate_size=S, moe_latent_size=7, mlp_bias=True,
                       mlp_hidden_act="relu2"),
        grouped(act="relu2", gated=False, latent=7, latent_bias=True, shared=MLP(W, S, "relu2", bias=True)),
    ),
    "longcat_flash": Family(
        "LongcatFlashMoE", "LongcatFlashConfig",
        dict(n_routed_experts=E, zero_expert_num=4, expert_ffn_hidden_size=N, num_experts_per_tok=5,
             routed_scaling_factor=1.5),
        lambda: mixture(Choice(5, factor=1.5), identity=4, balanced=True, exact=True),
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1Moe", "HunYuanMoEV1Config", dict(num_experts=E, intermediate_size=N, moe_topk=3),
        lambda: mixture(NORMED, shared=N, exact=True),
    ),
    "minimax_m2": Family(
        "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", dict(num_local_experts=E, intermediate_size=N),
        lambda: mixture(Choice(3, "sigmoid", normed=True), balanced=True),
    ),
    "jamba": Family(
        "JambaSparseMoeBlock", "JambaConfig", dict(num_experts=E, intermediate_size=N), lambda: mixture(PLAIN)
    ),
    "lfm2_moe": Family(
        "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig",
        dict(num_experts=E, moe_intermediate_size=N, routed_scaling_factor=1.5, norm_topk_prob=True),
        lambda: mixture(Choice(3, "sigmoid", normed=True, factor=1.5, eps=1e-6), balanced=True),
    ),
    "gpt_oss": Family(
        "GptOssMLP", "GptOssConfig", dict(num_local_experts=E, intermediate_size=N, swiglu_limit=0.5),
        lambda: mixture(NORMED, act=Gating("silu", 0.5, plus=1.0, slope=1.702), bias=True, logit_bias=True),
    ),
    "switch_transformers": Family(
        "SwitchTransformersSparseMLP", "SwitchTransformersConfig",
        dict(d_model=W, d_ff=N, num_experts=E, expert_capacity=2, router_bias=True),
        lambda: mixture(Choice(1), act="relu", gated=False, exact=True, logit_bias=True, capacity=2),
    ),
}  # fmt: skip


def copy_weights(ours: Mixture, theirs: dict[str, Tensor]) -> None:
    """Fills `ours` from the state of a block of transformers, whose names differ between families."""

    def find(*ends: str) -> Tensor:
        return next(tensor for end in ends for name, tensor in theirs.items() if name.endswith(end))

    def put(parameter: nn.Parameter | Tensor | None, *parts: Tensor) -> None:
        if parameter is not None:
            parameter.data.copy_(torch.cat(parts).view(parameter.shape))

    def proj(prefix: str) -> None:
        shared: Any = ours.shared
        if isinstance(shared, MLP):
            put(shared.up.weight, find(prefix + "up_proj.weight"))
            put(shared.up.bias, find(prefix + "up_proj.bias"))
            put(shared.down.bias, find(prefix + "down_proj.bias"))
        else:
            put(shared.gate_up.weight, find(prefix + "gate_proj.weight"), find(prefix + "up_proj.weight"))
        put(shared.down.weight, find(prefix + "down_proj.weight"))

    router = ours.router
    gate = [find("router.classifier.weight", "gate.wg.weight", "router.gate.weight", "router.weight", "gate.weight")]
    put(router.weight, *gate, *([find("shared_expert_gate.weight")] if router.opens else []))
    if router.bias is not None:
        put(router.bias, find("e_score_correction_bias", "expert_bias"))
    if router.logit_bias is not None:
        put(router.logit_bias, find("router.bias", "classifier.bias"))
    if ours.shared is not None:
        proj(next(name for name in theirs if "shared" in name and "_proj" in name).split(".")[0] + ".")
    if ours.enter is not None and ours.leave is not None:
        for linear, name in ((ours.enter, "fc1_latent_proj"), (ours.leave, "fc2_latent_proj")):
            put(linear.weight, find(f"{name}.weight"))
            put(linear.bias, find(f"{name}.bias"))
    experts = ours.experts
    if "experts.expert_0.wi.weight" in theirs:
        put(experts.first, *(theirs[f"experts.expert_{e}.wi.weight"] for e in range(E)))
        put(experts.down, *(theirs[f"experts.expert_{e}.wo.weight"] for e in range(E)))
    elif experts.first_bias is not None:  # GPT-OSS: transposed, gate and up alternate
        first, bias = find("experts.gate_up_proj").mT, find("experts.gate_up_proj_bias")
        put(experts.first, torch.cat((first[:, ::2], first[:, 1::2]), 1))
        put(experts.first_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), 1))
        put(experts.down, find("experts.down_proj").mT)
        put(experts.down_bias, find("experts.down_proj_bias"))
    else:
        put(experts.first, find("experts.gate_up_proj", "experts.up_proj")[:E])
        put(experts.down, find("experts.down_proj"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixture_with_the_options_of_a_family_is_that_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    torch.manual_seed(0)
    folder = f"transformers.models.{name}"
    config = getattr(import_module(f"{folder}.configuration_{name}"), family.config)(
        **{"hidden_size": W, "num_experts_per_tok": 3, "hidden_act": "silu"} | family.options
    )
    config._experts_implementation = "eager"
    theirs = getattr(import_module(f"{folder}.modeling_{name}"), family.block)(config).eval().requires_grad_(False)
    for tensor in theirs.state_dict().values():
        tensor.normal_(std=0.4)
    ours = family.ours().requires_grad_(False)
    copy_weights(ours, theirs.state_dict())
    x, onto = torch.randn(2, 9, W), torch.randn(2, 9, W)
    found = theirs(x)
    expected = found[0] if isinstance(found, tuple) else found
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours(x, onto), onto + expected, rtol=1e-4, atol=1e-5)


def test_a_factor_multiplies_what_is_added_to_the_residual() -> None:
    torch.manual_seed(0)
    plain, scaled = mixture(NORMED, shared=S, opens=True), mixture(NORMED, shared=S, opens=True, factor=0.25)
    scaled.load_state_dict(plain.state_dict())
    x, onto = torch.randn(2, 3, W), torch.randn(2, 3, W)
    torch.testing.assert_close(scaled(x, onto), onto + 0.25 * plain(x))


def test_options_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(InputError, match="weigh_input"):
        mixture(NORMED, weigh_input=True, bias=True)
    with pytest.raises(InputError, match="capacity=2 and 3 experts per token"):
        mixture(NORMED, capacity=2)
    with pytest.raises(InputError, match="cannot choose from 8 experts"):
        mixture(Choice(3, groups=3))


def test_tokens_of_earlier_passes_use_up_the_capacity_if_they_are_counted() -> None:
    torch.manual_seed(0)
    ours = mixture(Choice(1), experts=2, gated=False, capacity=3).requires_grad_(False)
    x, before = torch.randn(1, 9, W), torch.zeros(1, 1, 2)

    def count(tokens: Tensor) -> Tensor:
        nonlocal before
        sums = before + tokens.cumsum(-2)
        before = sums[:, -1:]
        return sums

    whole, parts = ours(x), [ours(x[:, at : at + 2], count=count) for at in range(0, 9, 2)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert (whole == 0).all(-1).any()  # some tokens found no room
