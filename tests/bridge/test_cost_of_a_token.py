"""A token over our cache costs the host fewer Python calls than over transformers' own, and no more kernels. Counts are
averages over the tokens of a turn, which is as many as our views are made for at once (bench/bridge/host.py)."""

from __future__ import annotations

import pytest
import transformers

from bench.bridge import host

SAVED: dict[str, dict[str, int]] = {  # Python calls of a token, at least
    "llama": {"growing": 11, "growing, attend": 31, "fixed": 32, "fixed, attend": 52},
    "gemma3, full windows": {"growing": 25, "growing, attend": 62, "fixed": 38, "fixed, attend": 75},
    "falcon_h1": {"growing": 11, "growing, attend": 28},
}
MOVES = 1.0  # kernels of a token, on average, that moves of windows may cost
VIEWS = 20  # views of a token that ours may make more: two for each store, and theirs may make none


def test_every_model_and_form_has_a_bound() -> None:
    assert {name: set(host.forms(config)) for name, config in host.configs().items()} == {
        name: set(forms) for name, forms in SAVED.items()
    }


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in SAVED.items() for form in forms])
def test_a_token_costs_fewer_python_calls_and_no_more_kernels(name: str, form: str) -> None:
    model = host.make_model(name)
    theirs, ours = host.costs(model, *host.forms(model.config)[form])
    newest = hasattr(transformers.Cache, "get_conv_state")  # older versions of transformers call less
    assert not newest or ours.calls <= theirs.calls - SAVED[name][form]
    assert ours.kernels <= theirs.kernels + (MOVES if "windows" in name else 0)
    assert ours.views <= theirs.views + VIEWS
