"""Cache files: they resume exactly, in another process too; what is not whole or not this model's is refused."""

from __future__ import annotations

import copy
import errno
import io
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lamina
from lamina import Cache, CacheFileError, InputError, load_cache
from lamina.attention.window import Sliding
from lamina.cache.io import checked_file
from lamina.config import Config
from lamina.models import family as family_of
from tests.cache.resume import SLACK, go_on
from tests.families import test_t5
from tests.families.cases import FIRST
from tests.families.harness import pair, random_ids, relative
from tests.laws.toys import KINDS, VOCAB, Attend, EncoderDecoder, Forgetful, Toy, toy
from tests.laws.world import World, reloaded

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def ragged(kind: str, capacity: int | None = None, slack: int = SLACK, rows: int = 3) -> Cache:
    """Rows of different lengths, one of them empty, most past every window of the toys."""
    world = World.fresh(kind, rows, capacity, slack, seed=KINDS.index(kind))
    world.feed(11, [11, 4, 0][:rows])
    world.feed(1, [1, 1, 0][:rows])
    return world.cache


# -- resuming ------------------------------------------------------------------------------------------------------


def test_another_process_goes_on_to_the_same_logits_bit_for_bit(tmp_path: Path) -> None:
    expected = {}
    for number, kind in enumerate(KINDS):
        for capacity in (None, 40):
            name = f"{number}-{capacity or 'grows'}"
            cache = ragged(kind, capacity).save(tmp_path / name)
            expected[name] = go_on(cache)
    script = [sys.executable, "-m", "tests.cache.resume", str(tmp_path)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, logits in expected.items():
        assert logits.isfinite().all()
        assert torch.equal(found[name], logits), KINDS[int(name.split("-")[0])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [None, 40])
def test_a_loaded_cache_says_of_itself_what_the_saved_one_says(kind: str, capacity: int | None, tmp_path: Path) -> None:
    cache = ragged(kind, capacity)
    loaded = reloaded(cache)
    assert str(loaded) == str(cache)
    assert loaded.tokens == cache.tokens
    assert loaded.rewindable.tolist() == cache.rewindable.tolist()
    assert (loaded.limit, loaded.nbytes, loaded.clock.sourced) == (cache.limit, cache.nbytes, cache.clock.sourced)
    assert torch.equal(loaded.logits.nan_to_num(7), cache.logits.nan_to_num(7))  # type: ignore[union-attr]


FAMILIES: list[tuple[str, Callable[[], Any]]] = [
    *((family, lambda family=family, name=name: pair(family, name)[1]) for family, name in FIRST),
    ("t5", lambda: test_t5.pair(test_t5.FIRST)[1]),
]


@pytest.mark.parametrize(("family", "make"), FAMILIES, ids=[family for family, _ in FAMILIES])
def test_generate_goes_on_from_a_file_as_if_it_had_never_stopped(
    family: str, make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    prompts = [random_ids(1, n, model.vocab, seed=n)[0].tolist() for n in (9, 2, 17)]
    for settings in ({}, {"do_sample": True, "seed": 5}):
        options = {"eos_token_id": [], **settings}
        unbroken = model.generate(prompts, max_new_tokens=14, **options)
        begun = model.generate(prompts, max_new_tokens=6, **options)
        begun.cache.save(tmp_path / "cache")
        cache = load_cache(tmp_path / "cache", model)
        ended = model.generate(max_new_tokens=8, cache=cache, row_ids=begun.row_ids, **options)
        assert [a + b for a, b in zip(begun.tokens, ended.tokens, strict=True)] == unbroken.tokens


def test_a_row_can_be_saved_by_itself(tmp_path: Path) -> None:
    cache = ragged("hybrid")
    cache.select([1]).save(tmp_path / "row")
    row = load_cache(tmp_path / "row", toy("hybrid"))
    assert row.tokens == cache.tokens[1:2]
    assert torch.equal(go_on(row), go_on(cache.select([1])))


def test_saving_changes_nothing_and_an_empty_cache_can_be_saved(tmp_path: Path) -> None:
    for kind in KINDS:
        saved, other = ragged(kind), ragged(kind)
        saved.save(tmp_path / "cache")
        assert torch.equal(go_on(saved), go_on(other)), kind
        fresh = World.fresh(kind, 3, None, SLACK, seed=1)
        loaded = reloaded(fresh.cache)
        assert torch.equal(go_on(loaded), go_on(fresh.cache)), kind


def test_a_cache_loaded_in_inference_mode_can_be_used_outside_of_it(tmp_path: Path) -> None:
    expected = go_on(ragged("hybrid").save(tmp_path / "cache"))
    with torch.inference_mode():
        loaded = load_cache(tmp_path / "cache", toy("hybrid"))
    assert torch.equal(go_on(loaded), expected)


@pytest.mark.parametrize("family", ["llama", "falcon_h1", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_model_in_another_dtype_takes_the_cache_over(family: str, low: torch.dtype) -> None:
    full = pair(family, dict(FIRST)[family])[1]
    half = copy.deepcopy(full).to(low)
    ids = random_ids(2, 24, full.vocab)
    truth = full(ids)
    plain = relative(half(ids).float(), truth)
    for saver, loader in ((full, half), (half, full)):
        cache = saver.new_cache(rows=2, slack=SLACK)
        saver(ids[:, :16], cache=cache)
        loaded = reloaded(cache, loader)
        assert loaded.dtype == loaded.logits.dtype == loader.dtype  # type: ignore[union-attr]
        loaded.rewind(2)
        found = loader(ids[:, 14:], cache=loaded)
        assert found.dtype == loader.dtype
        assert relative(found.float(), truth[:, 14:]) < 2 * plain


# -- what is in a file ---------------------------------------------------------------------------------------------


def test_only_slots_in_use_are_written(tmp_path: Path) -> None:
    for kind in KINDS:
        for capacity in (None, 4000):
            ragged(kind, capacity).reserve(40).save(tmp_path / str(capacity))
        tensors = [load_file(tmp_path / str(capacity)) for capacity in (None, 4000)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[1][name], one) for name, one in tensors[0].items() if name != "logits"), kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taken_back_is_not_in_the_file(kind: str, tmp_path: Path) -> None:
    for length in (5, 14):
        cache = World.fresh(kind, 2, None, SLACK).cache
        toy(kind)(random_ids(2, length, VOCAB), cache=cache)
        toy(kind)(embeds=torch.full((2, 2, 8), float("nan"), dtype=torch.float64), cache=cache)
        cache.rewind(2).save(tmp_path / "cache")
        for name, tensor in load_file(tmp_path / "cache").items():
            if name != "logits":
                assert tensor.isfinite().all(), name


def test_a_file_is_plain_safetensors_with_a_text_that_says_what_it_holds(tmp_path: Path) -> None:
    ragged("hybrid").save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", "pt") as file:
        assert file.get_tensor("layers.0.attention.k").shape == (3, 2, 8, 4)  # a window of 5 and the slack
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"]) == ("lamina cache", "1")
    text = json.loads(metadata["text"])
    assert text["kept"] == {
        "rows": 3,
        "capacity": None,
        "slack": SLACK,
        "dtype": "float64",
        "codecs": [["plain", "plain"]] * 2,
    }
    assert text["clock"]["lengths"] == [12, 5, 0]
    assert text["model"]["specs"][0]["convolution"] == "Convolution(channels=8, kernel=3)"


# -- what is refused -----------------------------------------------------------------------------------------------


def test_each_of_a_thousand_altered_bytes_is_noticed(tmp_path: Path) -> None:
    ragged("hybrid", rows=2).save(tmp_path / "cache")
    right, altered = (tmp_path / "cache").read_bytes(), tmp_path / "altered"
    header = 8 + int.from_bytes(right[:8], "little")
    rng = random.Random(0)
    places = [*range(200), *rng.choices(range(header), k=300), *rng.choices(range(header, len(right)), k=500)]
    for at in places:
        wrong = bytearray(right)
        wrong[at] ^= rng.choice([1, 2, 0x20, 0x80, 0xFF, rng.randint(1, 255)])
        altered.write_bytes(wrong)
        with pytest.raises(CacheFileError, match=r"altered|cut short|is not a cache file"):
            load_cache(altered, toy("hybrid"))
    altered.write_bytes(right)
    assert load_cache(altered, toy("hybrid")).lengths.tolist() == [12, 5]


def test_a_file_that_is_cut_short_longer_or_stirred_is_refused(tmp_path: Path) -> None:
    ragged("ssd").save(tmp_path / "cache")
    right, altered = (tmp_path / "cache").read_bytes(), tmp_path / "altered"
    rng = random.Random(0)
    for length in [*range(120), *rng.choices(range(len(right)), k=100), len(right) - 1]:
        altered.write_bytes(right[:length])
        with pytest.raises(CacheFileError, match=r"was cut short: of .* bytes it has"):
            load_cache(altered, toy("ssd"))
    blank = right[:3000] + bytes(2000) + right[5000:]
    swapped = right[:-16] + right[-8:] + right[-16:-8]
    for wrong in (right + b"\0", right + right, blank, swapped, right[:100] + right[101:]):
        altered.write_bytes(wrong)
        with pytest.raises(CacheFileError, match="altered"):
            load_cache(altered, toy("ssd"))


def test_files_that_are_something_else_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(CacheFileError, match=r"weights.safetensors is not a cache file; cache.save\(path\) writes one"):
        load_cache(tmp_path / "weights.safetensors", toy("full"))
    with pytest.raises(CacheFileError, match="nowhere does not exist"):
        load_cache(tmp_path / "nowhere", toy("full"))
    with pytest.raises(CacheFileError, match="is a folder, not a cache file"):
        load_cache(tmp_path, toy("full"))


def test_a_file_of_a_later_version_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(checked_file, "VERSION", 2)
        ragged("full").save(tmp_path / "cache")
    with pytest.raises(CacheFileError, match=r"has the format 'lamina cache' 2, and this version .* reads .* 1: read"):
        load_cache(tmp_path / "cache", toy("full"))


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid", "latent"])
def test_a_cache_in_codes_goes_on_from_its_file_bit_by_bit(kind: str, tmp_path: Path) -> None:
    model = toy(kind)
    cache = model.new_cache(rows=2, slack=SLACK, codec="k5v4")
    model([[1, 2, 3, 4, 5, 6, 7], [3, 1, 0, 0, 0, 0, 0]], cache=cache, counts=[7, 2])
    cache.save(tmp_path / "cache")
    again = load_cache(tmp_path / "cache", model)
    assert [str(codec) for codec in again.codecs] == [str(codec) for codec in cache.codecs]
    assert again.nbytes == cache.nbytes
    for one in (cache, again):
        one.rewind([2, 1])
    assert torch.equal(model([[5], [6]], cache=cache), model([[5], [6]], cache=again))


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.specs: dict[str, Any] = {}
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x + self.down(self.up(x))


def other_vocabulary() -> Toy:
    model = Toy(Attend(), Attend())
    model.vocab = 14
    return model


def other_weight() -> Toy:
    model = Toy(Attend(), Wide(5))
    model.blocks[1].down.weight[-1, -1] += 1e-6  # type: ignore[union-attr, operator, index]
    return model


OTHERS: list[tuple[Callable[[], Toy], Callable[[], Toy], str]] = [
    (lambda: Toy(Attend()), lambda: EncoderDecoder(Attend()), "of the family Toy, this one is of EncoderDecoder"),
    (lambda: Toy(Attend(), Attend()), lambda: Toy(Attend(), Attend(), Forgetful()), "with 2 layers, this one has 3"),
    (lambda: Toy(Attend(), Attend()), other_vocabulary, "with a vocabulary of 13, this one's has 14"),
    (
        lambda: Toy(Attend(), Attend()),
        lambda: Toy(Attend(), Attend(Sliding(4))),
        "whose layer 1 remembers attention: Attention(kv_heads=2, key_dim=4, value_dim=4, window=Full()), this one's "
        "attention: Attention(kv_heads=2, key_dim=4, value_dim=4, window=Sliding(size=4, keep=0))",
    ),
    (lambda: Toy(Attend(), Wide(5)), lambda: Toy(Attend(), Wide(6)), "with 725 parameters, this one has 742"),
    (
        lambda: Toy(Attend(), Wide(5)),
        other_weight,
        "with other weights, of which blocks.1.down.weight is the first that differs",
    ),
]


@pytest.mark.parametrize(("one", "other", "difference"), OTHERS, ids=[text[:24] for _, _, text in OTHERS])
def test_another_model_is_refused_with_what_differs(
    one: Callable[[], Toy], other: Callable[[], Toy], difference: str, tmp_path: Path
) -> None:
    one().new_cache().save(tmp_path / "cache")
    load_cache(tmp_path / "cache", one())
    with pytest.raises(CacheFileError) as told:
        load_cache(tmp_path / "cache", other())
    expected = f"{tmp_path / 'cache'} was saved by a model {difference}: load it with the model that saved it"
    assert str(told.value) == expected


def test_another_configuration_of_the_same_weights_is_refused(tmp_path: Path) -> None:
    model = pair("llama", dict(FIRST)["llama"])[1]
    model.new_cache().save(tmp_path / "cache")

    def again(**changes: Any) -> lamina.Model:
        new = family_of("llama").build(Config(model.config.values | changes))
        new.load_state_dict(model.state_dict())
        return new

    load_cache(tmp_path / "cache", again(initializer_range=7.0, torch_dtype="bfloat16"))
    with pytest.raises(CacheFileError, match=r"with rms_norm_eps=.* in its configuration, this one has 0.5: load"):
        load_cache(tmp_path / "cache", again(rms_norm_eps=0.5))


def test_a_dtype_that_a_file_does_not_hold_and_a_device_that_is_none_are_named(tmp_path: Path) -> None:
    cache = ragged("full")
    with pytest.raises(InputError, match=r"^device='gpu' cannot be used: .* such as 'cpu'"):
        cache.save(tmp_path / "cache")
        load_cache(tmp_path / "cache", toy("full"), device="gpu")
    cache.layers[0]["attention"].data["k"] = torch.zeros(2, 1, 8, 3, dtype=torch.complex64)
    with pytest.raises(CacheFileError, match=r"attention.k is in torch.complex64, which a cache file does not hold"):
        cache.save(tmp_path / "cache")


def test_what_cannot_be_saved_is_told_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"belongs to no model, .*: make the cache with model.new_cache\(\)"):
        Cache(toy("full").specs).save(tmp_path / "cache")
    with pytest.raises(CacheFileError, match="cannot be written: there is no folder"):
        ragged("full").save(tmp_path / "no" / "cache")
    with pytest.raises(CacheFileError, match="cannot be written: it is a folder"):
        ragged("full").save(tmp_path)
    assert not list(tmp_path.iterdir())


# -- writing -------------------------------------------------------------------------------------------------------


class FullDisk(io.FileIO):
    """Takes some writes, half of the next one, and then nothing."""

    def __init__(self, path: Path | int, mode: str, writes: int) -> None:
        super().__init__(path, mode)
        self.writes = writes

    def write(self, data: Any) -> int:
        if self.writes == 0:
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writes -= 1
        return super().write(data)


named = pytest.mark.parametrize("name", ["without a name", "under a name"])
"""What a file that is being written has: nothing until it is complete, or a name from the start, where it must."""


@pytest.fixture
def system(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "under a name":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no files without a name")


@named
def test_a_failure_at_any_write_leaves_the_old_file_and_nothing_else(
    name: str, system: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = ragged("hybrid"), World.fresh("hybrid", 1, None, SLACK).cache
    path = tmp_path / "cache"
    old.save(path)
    right, writes, failed = path.read_bytes(), 0, True
    while failed:
        with monkeypatch.context() as disk:
            disk.setattr(checked_file, "open", lambda path, mode, n=writes: FullDisk(path, mode, n), raising=False)
            disk.setattr(os, "fdopen", lambda file, mode, n=writes: FullDisk(file, mode, n))
            try:
                new.save(path)
                failed = False
            except OSError:
                assert path.read_bytes() == right, writes
                assert list(tmp_path.iterdir()) == [path]
        writes += 1
    assert writes > 20  # one for each tensor, and the header twice
    assert load_cache(path, toy("hybrid")).rows == 1


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError, KeyboardInterrupt])
@named
def test_a_failure_before_the_file_is_in_place_leaves_the_old_one(
    name: str, system: None, call: str, problem: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    ragged("full").save(path)
    right = path.read_bytes()

    def fail(*_: object) -> None:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        with pytest.raises(problem):
            ragged("full", rows=1).save(path)
    assert path.read_bytes() == right
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_what_it_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far" / "cache")
    ragged("full").save(tmp_path / "near")
    assert (tmp_path / "near").is_symlink()
    assert load_cache(tmp_path / "far" / "cache", toy("full")).rows == 3


@named
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_process_killed_while_saving_leaves_a_whole_file_and_nothing_that_stays(
    name: str, system: None, tmp_path: Path
) -> None:
    model, path, rng = toy("full"), tmp_path / "cache", random.Random(0)
    caches = []
    for length in (60, 90):
        caches.append(model.new_cache(rows=40, slack=2))
        model(random_ids(40, length, VOCAB), cache=caches[-1], logits="last")
    caches[0].save(path)
    saving = mmap.mmap(-1, 1)  # shared with the child: whether it is in the middle of a save
    unfinished, left, started = 0, 0, time.monotonic()
    while unfinished < 6 or (left < 3 and name == "under a name"):  # kills that are to come in the middle of a save
        assert time.monotonic() - started < 60
        saving[0] = 0
        child = os.fork()
        if child == 0:
            try:
                while True:
                    for cache in caches:
                        saving[0] = 1
                        cache.save(path)
                        saving[0] = 0
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += saving[0]
        partial = [one for one in tmp_path.iterdir() if one != path]
        left += len(partial)
        assert len(partial) <= 1, "the next save removes what the last one left"
        assert load_cache(path, model).tokens in [cache.tokens for cache in caches]
    assert name == "under a name" or left <= 1, "but for the moment between getting a name and its place"
    caches[0].save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_somebody_is_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "cache"
    abandoned, other = (tmp_path / f".{name}.0123abcd.partial" for name in ("cache", "cached"))
    abandoned.write_bytes(b"what a killed process left")
    other.write_bytes(b"of another file")
    with checked_file.replace_file(path) as file:
        assert not abandoned.exists()
        (own,) = tmp_path.glob(".cache.*.partial")
        ragged("full").save(path)
        assert own.exists()
        file.write(b"the last one to be complete")
    assert path.read_bytes() == b"the last one to be complete"
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_a_file_gets_its_name_by_a_copy_where_it_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(os, "link", fail)
    ragged("full").save(tmp_path / "cache")
    assert load_cache(tmp_path / "cache", toy("full")).rows == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]
