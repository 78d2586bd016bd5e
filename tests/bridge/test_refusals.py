"""What `lamina.bridge.Cache` cannot do is refused at construction, by name and with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from lamina import bridge
from lamina.bridge.layers.kinds import OWN_CACHE
from lamina.errors import InputError
from tests.bridge.models import SMALL, ids, model

CONFIG = transformers.LlamaConfig(**SMALL)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "capacity 0": ({"capacity": 0}, "capacity must be at least 1, not 0; None lets the cache grow"),
    "capacity True": ({"capacity": True}, "capacity"),
    "slack -1": ({"slack": -1}, "slack must be 0 or more, not -1"),
    "residence": ({"residence": "disk"}, "disk"),
    "codec": ({"codec": "int7"}, "int7"),
    "codec of a layer that is not there": ({"codec": {99: "int8"}}, "99"),
    "pool": ({"pool": 3}, r"pool=3: it must be a lamina\.bridge\.Pool"),
    "pool and host": ({"pool": bridge.Pool(tokens=64), "residence": "host"}, "pages are on the device; leave one out"),
    "pool and slack": ({"pool": bridge.Pool(tokens=64), "slack": 2}, "give them to the pool"),
    "pool and codec": ({"pool": bridge.Pool(tokens=64), "codec": "int8"}, "give them to the pool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_used_are_named(name: str) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        bridge.Cache(CONFIG, **arguments)


@pytest.mark.parametrize("name", sorted(OWN_CACHE))
def test_models_with_a_cache_of_their_own_are_named_with_the_reason(name: str) -> None:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have the family")
    config = transformers.CONFIG_MAPPING[name]()
    with pytest.raises(InputError, match=f"a {name} model cannot use lamina.bridge.Cache: it"):
        bridge.Cache(config)


def test_a_layer_type_that_is_not_stored_is_named_with_those_that_are() -> None:
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["full_attention", "full_attention", "full_attention", "compressed_sparse_attention"]
    with pytest.raises(InputError, match="layer 3 of this llama model is of the type 'compressed_sparse_attention'"):
        bridge.Cache(config)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="is no transformers model"):
        bridge.Cache(torch.nn.Linear(2, 2))


def test_a_codec_for_a_model_of_states_alone_is_refused() -> None:
    with pytest.raises(InputError, match="codec"):
        bridge.Cache(model("mamba2"), codec="int8")


@torch.inference_mode()
def test_rows_that_do_not_fit_are_refused_with_the_way_out() -> None:
    cache = bridge.Cache(model("llama"))
    for _ in range(3):
        model("llama")(ids(2)[0], past_key_values=cache)
    with pytest.raises(InputError, match=r"holds 2 rows of 27 tokens, and 1 rows were given: .*reset"):
        model("llama")(ids(1)[0], past_key_values=cache)


@torch.inference_mode()
def test_a_verb_on_one_layer_is_refused_with_that_of_the_cache() -> None:
    cache = bridge.Cache(model("llama"))
    model("llama")(ids(1)[0], past_key_values=cache)
    with pytest.raises(InputError, match=r"layer 0 alone cannot do crop: .* call cache\.crop"):
        cache.layers[0].crop(-1)
