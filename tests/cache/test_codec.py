"""Codecs as a user meets them: names, layers, bytes, what is refused, and passes of every kind over written tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina import Cache, Codec, InputError
from lamina.cache.codec.codec import codec_names, codecs_of
from lamina.cache.codec.key_mean import key_means_of
from lamina.cache.layers.tokens import TokenLayer
from lamina.config import Config
from lamina.models.llama import Llama
from tests.laws.toys import KINDS, assert_close, random_ids, toy, truth
from tests.runtime.test_compiled import compiled, decode


@pytest.fixture(scope="module")
def llama() -> Llama:
    """Heads of 64 numbers."""
    torch.manual_seed(0)
    shape = dict(hidden_size=256, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, vocab_size=61)
    return Llama.build(Config(dict(model_type="llama", num_hidden_layers=3, rms_norm_eps=1e-5) | shape))


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_names_mean_what_they_say() -> None:
    assert codec_names()["int4"] == Codec(4, 4) == Codec.of("k4v4") and str(Codec(4, 4)) == "int4"
    assert Codec.of("k5v4") == Codec(keys=5, values=4) and str(Codec(5, 4)) == "k5v4"
    assert str(Codec(keys="fp8", values=4)) == "keys fp8, values 4"


@pytest.mark.parametrize(("given", "nearest"), [("int-8", "int8"), ("k8v5x", "k8v5"), ("pf8", "fp8"), ("int7", "int8")])
def test_an_unknown_name_is_told_with_the_nearest_known_one(llama: Llama, given: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"there is no codec '{given}'; the nearest is '{nearest}'"):
        llama.new_cache(codec=given)


def test_bits_that_no_codec_has_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"values=7: there is no such format; the nearest is .* Formats are 8, 6, 5, 4, 'fp8', 'plain'"
    ):
        Codec(keys=8, values=7)


def test_layers_may_have_codecs_of_their_own(llama: Llama) -> None:
    def named(codec: Any) -> list[str]:
        return [str(one) for one in codecs_of(codec, llama.specs)]

    assert named(None) == named("plain") == named({}) == ["plain"] * 3
    assert named({"default": "int4", 0: "int8", -1: Codec(6, 5)}) == ["int8", "int4", "k6v5"]
    assert named({1: "fp8"}) == ["plain", "fp8", "plain"]
    table = str(llama.new_cache(codec={"default": "int4", 0: "plain"}))
    assert "float32" in table and "int4" in table
    for wrong in (3, -4, "first"):
        with pytest.raises(InputError, match=rf"codec names layer {wrong!r}: layers are 0 to 2"):
            llama.new_cache(codec={wrong: "int8"})


def test_a_codec_that_would_write_nothing_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"codec 'int8' .* this model has none: it remembers Recurrent, which no"):
        toy("ssd").new_cache(codec="int8")
    with pytest.raises(InputError, match=r"this model has none: it remembers nothing"):
        toy("nothing to remember").new_cache(codec="int8")
    with pytest.raises(InputError, match=r"codec 'k8v4' .* layer 3 has none: it remembers Recurrent"):
        toy("layers without memory").new_cache(codec={3: "k8v4"})
    assert toy("ssd").new_cache(codec="plain").nbytes == toy("ssd").new_cache().nbytes


def test_states_and_convolutions_of_a_hybrid_stay_as_they_are() -> None:
    plain, coded = (toy("hybrid").new_cache(codec=codec).layers[0] for codec in (None, "int4"))
    for name in ("state", "convolution"):
        assert {n: x.dtype for n, x in plain[name].data.items()} == {n: x.dtype for n, x in coded[name].data.items()}
    assert set(coded["attention"].data) == {"k.codes", "k.scales", "v.codes", "v.scales"}


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "keys", "values"), [
    ("int8", 9, 9), ("int6", 7, 7), ("int5", 6, 6), ("int4", 5, 5), ("k8v4", 9, 5), ("k5v4", 6, 5),
])  # fmt: skip
def test_a_number_takes_its_bits_and_one_more(llama: Llama, codec: str, keys: int, values: int) -> None:
    cache = llama.new_cache(rows=2, capacity=10, codec=codec)
    assert cache.nbytes == 2 * 10 * 3 * 2 * 64 * (keys + values) // 8
    assert codec in str(cache)


def test_fp8_takes_a_byte_a_number_and_two_a_vector(llama: Llama) -> None:
    assert llama.new_cache(capacity=10, codec="fp8").nbytes == 10 * 3 * 2 * 2 * (64 + 2)


# -- passes ------------------------------------------------------------------------------------------------------------


def test_a_wide_codec_is_near_the_plain_cache_and_a_narrow_one_less_so(llama: Llama) -> None:
    ids = torch.randint(61, (2, 50))
    plain = decode(llama, llama.new_cache(2), ids, 5)
    errors = {}
    for codec in ("int8", "int6", "int5", "int4", "fp8", Codec(values=4)):
        found = decode(llama, llama.new_cache(2, codec=codec), ids, 5)
        errors[str(codec)] = float((found - plain).abs().max() / plain.abs().max())
    assert errors["int8"] < 0.01 and errors["int4"] < 0.2 and errors["fp8"] < 0.1
    assert errors["int8"] < errors["int6"] < errors["int5"] < errors["int4"]


def test_speculation_makes_the_tokens_of_plain_decoding(llama: Llama) -> None:
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6, 5, 6, 5]]
    cache = [llama.new_cache(2, codec="k5v4") for _ in range(2)]
    plain = llama.generate(prompts, 24, cache=cache[0], eos_token_id=())
    drafted = llama.generate(prompts, 24, cache=cache[1], eos_token_id=(), prompt_lookup_num_tokens=4)
    assert drafted.tokens == plain.tokens
    assert cache[0].codecs == cache[1].codecs == [Codec(5, 4)] * 3


def test_caches_of_different_codecs_are_not_joined(llama: Llama) -> None:
    one, other = llama.new_cache(codec="int8"), llama.new_cache(codec={"default": "int8", 1: "int4"})
    with pytest.raises(InputError, match="codec int8 and int4 in layer 1 cannot be joined"):
        Cache.join([one, other])
    both = Cache.join([one, llama.new_cache(codec="int8")])
    assert both.rows == 2 and both.codecs == one.codecs


def test_compiled_blocks_read_codes_with_one_program_for_all_of_a_kind(llama: Llama) -> None:
    ids = torch.randint(61, (2, 36))  # past the first growth
    plain = decode(llama, llama.new_cache(2, codec="k5v4"), ids, 1)
    with compiled(llama) as counter:
        found = decode(llama, llama.new_cache(2, codec="k5v4"), ids, 1)
        assert counter.frame_count == 1
    # A number on the edge between two codes may fall to the other side.
    assert float((found - plain).abs().max() / plain.abs().max()) < 0.05


@pytest.mark.parametrize(("kind", "codec"), [("wide heads", "k5v4"), ("latent, sliding", "fp8"), ("cross", "int8")])
def test_one_graph_of_a_whole_pass_serves_every_length(kind: str, codec: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, counter = toy(kind), CompileCounterWithBackend("aot_eager")
    run: Any = torch.compile(model.forward, fullgraph=True, backend=counter)
    cache, ids, source = model.new_cache(capacity=32, codec=codec), random_ids(1, 7), None
    if kind == "cross":
        cache.attach(model.encode([[1, 2, 3]]))
        source = (1, 2, 3)
    expected = truth(kind, tuple(ids[0].tolist()), source, codec)
    for t in range(7):
        step = cache.step(1)
        found = run(ids[:, t : t + 1].contiguous(), step)
        step.commit()
        assert_close(found[0, 0], expected[t], f"{kind}, token {t}")
    assert counter.frame_count == 1


# -- mean keys ---------------------------------------------------------------------------------------------------------


def test_mean_keys_belong_to_the_model_and_are_computed_once(llama: Llama) -> None:
    means = key_means_of(llama)
    assert {key: tuple(mean.shape) for key, mean in means.items()} == {(i, "attention"): (2, 64) for i in range(3)}
    assert key_means_of(llama) is means
    a, b = llama.new_cache(codec="int4"), llama.new_cache(rows=3, codec="k8v4")
    assert a.key_means is b.key_means is means
    assert not llama.new_cache(codec=Codec(values=4)).key_means
    with torch.inference_mode():
        del llama.__dict__["_key_means"]
        again = key_means_of(llama)
    assert all(torch.equal(again[key], means[key]) and not again[key].is_inference() for key in means)


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_with_keys_has_a_mean_key(kind: str) -> None:
    model = toy(kind)
    if not any(spec.takes_codec for entry in model.specs for spec in entry.values()):
        return
    means = key_means_of(model)
    cache = model.new_cache(codec="int8")
    for i, entry in enumerate(cache.layers):
        for name, layer in entry.items():
            keys = "k.codes" in layer.data
            assert ((i, name) in means) == keys or not keys
            if keys:
                assert layer.coding.formats["k"].key_mean is not None  # type: ignore[attr-defined]
                assert layer.coding.formats["v"].key_mean is None  # type: ignore[attr-defined]
            elif isinstance(layer, TokenLayer) and layer.coding.formats:
                assert all(one.key_mean is None for one in layer.coding.formats.values())  # type: ignore[attr-defined]
