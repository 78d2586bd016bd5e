"""A format from outside the package, in one class: 8-bit integers with one scale a vector, and no rotation.

It goes through the laws, files, plans, pages, the host, prefix stores and captured decoding as the built-in ones do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lamina
from lamina import Cache, CacheFileError, Codec, InputError, load_cache
from lamina.cache import Field, FieldFormat, unregister_format
from lamina.cache.codec.registry import format_names
from lamina.cache.summary import lines
from lamina.runtime.eligibility import why_no_kernels
from tests.laws import test_codecs, test_laws
from tests.laws.toys import CODECS, Toy, assert_close, random_ids, toy, truth
from tests.planning.models import config, model

NAME = "absmax8"
LAW = "absmax8, from outside"  # in the tables of the laws


class AbsMax8(FieldFormat):
    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self.parts = {"codes": (field.dim, torch.int8), "scale": (1, torch.float32)}

    def quantize(self, x: Tensor) -> dict[str, Tensor]:
        scale = (x.abs().amax(-1, keepdim=True) / 127).float().clamp(min=1e-30)
        return {"codes": (x / scale).round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def dequantize(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["codes"] * parts["scale"].to(self.exact)

    def error_bound(self, x: Tensor) -> Tensor:
        return x.abs().amax(-1) / 254 * x.shape[-1] ** 0.5 * (1 + 1e-4)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = format_names()
    lamina.register_format(NAME, AbsMax8)
    monkeypatch.setitem(CODECS, LAW, NAME)
    yield
    if NAME in format_names():
        unregister_format(NAME)
    assert format_names() == before


# -- laws --------------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, dict[str, Any]]] = [
    ("chunking", dict(kind="full", residence="device", rows=2)),
    ("chunking", dict(kind="latent, sliding", residence=3, rows=2)),
    ("chunking", dict(kind="cross", residence="host", rows=2)),
    ("independence", dict(kind="sliding and full", residence=4, rows=3)),
    ("rewind_append", dict(kind="shared", residence="host")),
    ("rewind_goes", dict(kind="sliding and full", residence="device")),
    ("rows_verbs", dict(kind="hybrid", residence=3)),
    ("rows_verbs", dict(kind="tokens", residence="host")),
    ("layout", dict(kind="wide heads", residence="device")),
    ("poison", dict(kind="sliding and full", residence=3, value=float("nan"))),
    ("poison", dict(kind="cross", residence="host", value=float("inf"))),
    ("atomic", dict(kind="full", residence="device", T=4, block=1, numbers=True)),
    ("codec", dict(kind="wide heads", residence="host")),
]


@pytest.mark.parametrize(("law", "how"), CASES, ids=lambda one: one if isinstance(one, str) else one["kind"])
def test_the_laws_hold_for_it(law: str, how: dict[str, Any]) -> None:
    found = {**vars(test_laws), **vars(test_codecs)}
    (name,) = (name for name in found if name.startswith(f"test_{law}_"))
    more = dict(codec=LAW, slack=2, seed=5) | ({} if law == "layout" else {"capacity": None})
    found[name].hypothesis.inner_test(**more, **how)


# -- names -------------------------------------------------------------------------------------------------------------


def test_codecs_sides_and_layers_take_its_name() -> None:
    full = toy("wide heads")
    mixed, first = Codec(keys=NAME, values=8), {0: NAME}
    ways: list[tuple[Any, str]] = [(NAME, NAME), (mixed, "keys absmax8, values 8"), (first, NAME)]
    for codec, shown in ways:
        cache = full.new_cache(codec=codec)
        assert shown in str(cache)
        assert cache.layers[0]["attention"].data["k.codes"].dtype == torch.int8
    assert str(Codec(NAME, NAME)) == NAME and Codec.of(NAME) == Codec(NAME, NAME)
    both = Cache.join([full.new_cache(codec=NAME), full.new_cache(codec=NAME)])
    assert both.codecs == [Codec(NAME, NAME)] * len(full.specs)


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(InputError, match="there is no codec 'absmax'; the nearest is 'absmax8'"):
        toy("full").new_cache(codec="absmax")
    with pytest.raises(InputError, match=r"keys='absmin8': there is no such format; the nearest is 'absmax8'"):
        Codec(keys="absmin8")


def test_a_number_of_bits_may_be_added_and_gets_the_names_of_bits() -> None:
    lamina.register_format(3, AbsMax8)
    try:
        assert Codec.of("int3") == Codec(3, 3) == Codec.of("k3v3") and str(Codec(3, 4)) == "k3v4"
        assert toy("full").new_cache(codec="k3v4").layers[0]["attention"].coding.formats["k"].name == "3"  # type: ignore[attr-defined]
    finally:
        unregister_format(3)


def test_what_cannot_be_registered_is_refused() -> None:
    names: list[Any] = ["int8", "k8v4", "two words", "", "8", 0, 2.5, None, True]
    for name in names:
        with pytest.raises(InputError, match="a format cannot be named"):
            lamina.register_format(name, AbsMax8)
    with pytest.raises(InputError, match="there is a format 'fp8' already"):
        lamina.register_format("fp8", AbsMax8)
    with pytest.raises(InputError, match="there is a format 'absmax8' already"):
        lamina.register_format(NAME, lambda field: None)
    with pytest.raises(InputError, match=r"format 'five' is 5: it must be a subclass of lamina.FieldFormat"):
        lamina.register_format("five", 5)  # type: ignore[call-overload]
    for name in ("plain", 8, "none"):
        with pytest.raises(InputError, match="is not a format that was registered from outside"):
            unregister_format(name)
    assert lamina.register_format(NAME)(AbsMax8) is AbsMax8  # the same class again: a notebook's cell that runs twice


@pytest.mark.parametrize(
    "parts", [None, {}, {"a.b": (1, torch.uint8)}, {"codes": (0, torch.uint8)}, {"codes": (1, torch.float8_e4m3fn)}]
)
def test_parts_that_cannot_be_stored_are_refused(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbsMax8, "__init__", lambda self, field: self.__dict__.update(parts=parts, name=""))
    with pytest.raises(InputError, match="format 'absmax8' has"):
        toy("full").new_cache(codec=NAME)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = toy("full").new_cache(rows=2, codec=NAME)
    toy("full")(random_ids(2, 6), cache=cache)
    cache.save(tmp_path / "cache")
    return tmp_path / "cache"


def test_a_file_names_it_and_goes_on(saved: Path) -> None:
    ids, full = random_ids(2, 6).tolist(), toy("full")
    ways: list[dict[str, Any]] = [{}, {"residence": "host"}, {"pool": lamina.Pool(full, page=4, codec=NAME)}]
    for how in ways:
        cache = load_cache(saved, full, **how)
        found = full([[3], [4]], cache=cache)
        assert found is not None and cache.codecs == [Codec(NAME, NAME)] * len(full.specs)
        for row, new in enumerate((3, 4)):
            assert_close(found[row, -1], truth("full", (*ids[row], new), None, LAW)[-1])


def test_a_file_of_a_format_that_is_not_registered_says_what_to_register(saved: Path) -> None:
    unregister_format(NAME)
    with pytest.raises(
        CacheFileError, match=r"format 'absmax8', which is not .* call lamina.register_format\('absmax8'"
    ):
        load_cache(saved, toy("full"))


def test_a_file_is_not_read_by_another_format_of_the_same_name(saved: Path) -> None:
    class Unsigned(AbsMax8):
        def __init__(self, field: Field) -> None:
            super().__init__(field)
            self.parts["codes"] = (field.dim, torch.uint8)

    unregister_format(NAME)
    lamina.register_format(NAME, Unsigned)
    with pytest.raises(CacheFileError, match=r"the format 'absmax8' has .* register the class that wrote the file"):
        load_cache(saved, toy("full"))


# -- plans, stores, captured steps -------------------------------------------------------------------------------------


def test_a_plan_knows_its_bytes() -> None:
    llama = model("llama")
    (spec,) = {spec for entry in llama.specs for spec in entry.values()}
    token = len(llama.specs) * spec.kv_heads * (spec.key_dim + 4 + spec.value_dim + 4)  # type: ignore[attr-defined]
    for page in (None, 4):
        plan = lamina.plan(
            config("llama"), rows=2, length=8, capacity=8, codec=NAME, page=page, dtype="bfloat16", bandwidth="1TB/s"
        )
        assert plan.moved is not None and plan.moved.tokens == 2 * 8 * token and NAME in str(plan)
    assert lines(llama.new_cache(2, 8, codec=NAME))[0].nbytes == 2 * 8 * token


def test_a_prefix_store_reuses_it() -> None:
    llama = model("llama")
    pool = lamina.Pool(llama, tokens=64, page=4, codec=NAME)
    store = lamina.PrefixStore(llama, 1 << 20, pool=pool)
    prompt = [[1, 2, 3, 4, 5, 6, 7, 8]]
    first = llama.generate(prompt, 3, prefixes=store, eos_token_id=())
    again = llama.generate(prompt, 3, prefixes=store, eos_token_id=())
    assert again.tokens == first.tokens and again.reused == [8]
    assert first.cache.codecs[0] == Codec(NAME, NAME)


def test_captured_decoding_names_the_format_that_no_kernel_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = model("llama")
    reason = "layer 0 entry 'attention': no kernel reads the format 'absmax8'; there are kernels for 8, 6, 5 and 4 bits"

    def as_on_a_gpu(model: Any, cache: Cache) -> str | None:
        return why_no_kernels(model.specs, cache.layers, model.dtype)

    monkeypatch.setattr("lamina.generation.strategies.captured.why_not_captured", as_on_a_gpu)
    for codec in (NAME, Codec(keys=8, values=NAME)):
        found = llama.generate([[1, 2, 3]], 2, cache=llama.new_cache(codec=codec))
        assert found.how.startswith(f"plain passes, since {reason}")


class AsEightBits(FieldFormat):
    """A format that says the kernels may write and read it, by way of the built-in one."""

    def __init__(self, field: Field) -> None:
        from lamina.cache.codec.formats import Grouped

        super().__init__(field)
        self.inner = Grouped(field, 8)
        self.parts, self.rotation = self.inner.parts, self.inner.rotation

    kernel_layout = property(lambda self: 8)

    def quantize(self, x: Tensor) -> dict[str, Tensor]:
        return self.inner.quantize(x)

    def dequantize(self, parts: dict[str, Tensor]) -> Tensor:
        return self.inner.dequantize(parts)

    def error_bound(self, x: Tensor) -> Tensor:
        return self.inner.error_bound(x)


def test_a_format_that_names_a_kernels_layout_is_captured_and_its_subclasses_are_not() -> None:
    class Changed(AsEightBits):
        pass

    full: Toy = toy("wide heads")
    for chosen, captured in ((AsEightBits, True), (Changed, False)):
        lamina.register_format("eight", chosen)
        try:
            cache = full.new_cache(codec="eight")
            assert (why_no_kernels(full.specs, cache.layers, torch.float32) is None) == captured
        finally:
            unregister_format("eight")
