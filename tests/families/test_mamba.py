"""What families with a state-space mixer promise beyond their logits: bfloat16, rewinding in it, refused shapes."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import lamina
from lamina.config import Config
from lamina.errors import InputError
from lamina.model import Model
from lamina.models.falcon_h1 import FalconH1
from lamina.models.mamba2 import Mamba2
from lamina.nn import GatedRMSNorm
from tests.families.cases import ALL, cases
from tests.families.harness import pair, random_ids, relative, truth

every_case = pytest.mark.parametrize(
    ("family", "name"), [case for case in ALL if case[0] in ("mamba", "mamba2", "falcon_h1")]
)


def in_bfloat16(family: str, name: str) -> tuple[Any, Model]:
    theirs, _ = pair(family, name)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        low = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        return low, lamina.load(folder, dtype=torch.bfloat16, device="cpu")


@every_case
def test_bfloat16_is_as_near_to_float32_as_it_is_in_transformers(family: str, name: str) -> None:
    exact, _ = pair(family, name)
    theirs, ours = in_bfloat16(family, name)
    ids = random_ids(4, 40, ours.vocab)
    expected = truth(exact, ids)
    # Root mean squares: the largest of thousands of roundings is a matter of luck.
    our_error, their_error = ((low.float() - expected).square().mean() for low in (ours(ids), truth(theirs, ids)))
    assert our_error.sqrt() < 1.25 * their_error.sqrt()


@every_case
def test_rewinding_in_bfloat16_keeps_no_rounding(family: str, name: str) -> None:
    _, ours = in_bfloat16(family, name)
    ids, other = random_ids(2, 30, ours.vocab), random_ids(2, 3, ours.vocab, seed=9)
    straight, rewound = ours.new_cache(rows=2, slack=4), ours.new_cache(rows=2, slack=4)
    for piece in ids.split([5, 1, 1, 9, 2, 12], dim=1):
        ours(other, cache=rewound)
        rewound.rewind(3).poison()
        found, expected = ours(piece, cache=rewound), ours(piece, cache=straight)
        assert relative(found.float(), expected.float()) < 1e-5


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_the_residual_is_float32_where_the_configuration_says_so(family: str) -> None:
    seen = []
    _, ours = in_bfloat16(family, next(iter(cases(family))))
    ours.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    assert ours(random_ids(1, 3, ours.vocab)).dtype == torch.bfloat16
    assert seen == [torch.float32]


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_gated_norm_normalises_each_group_by_itself(groups: int, gate_first: bool) -> None:
    torch.manual_seed(0)
    norm = GatedRMSNorm(12, 1e-5, groups=groups, gate_first=gate_first).requires_grad_(False)
    norm.weight.normal_()
    x, gate = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    value = x * F.silu(gate) if gate_first else x
    size = 12 // groups
    parts = [F.rms_norm(part, (size,), eps=1e-5) for part in value.split(size, dim=-1)]
    expected = torch.cat(parts, dim=-1) * norm.weight * (1 if gate_first else F.silu(gate))
    torch.testing.assert_close(norm(x, gate), expected)


def test_widths_that_do_not_fit_are_refused_by_name() -> None:
    mamba2 = Config(cases("mamba2")["grouped"]().to_dict()).with_values(num_heads=7)
    with pytest.raises(InputError, match=r"num_heads 7 × head_dim 8 .* is 56, but expand × hidden_size is 64"):
        Mamba2(mamba2)
    falcon = Config(cases("falcon_h1")["factors"]().to_dict()).with_values(mamba_d_head=9)
    with pytest.raises(InputError, match=r"mamba_n_heads 6 × mamba_d_head 9 .* is 54, but the mixer is 48 wide"):
        FalconH1(falcon)
