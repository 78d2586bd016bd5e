"""A model of one's own: the program that the README shows runs, and a model needs no configuration for anything."""

from __future__ import annotations

import copy
import re
import runpy
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lamina
from docs.own_model import Block, Mine

ROOT = Path(__file__).parent.parent
PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def model() -> Mine:
    torch.manual_seed(0)
    return Mine(vocab=40, width=16, heads=2).eval()


def test_the_program_that_the_readme_shows_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = ROOT / "docs" / "own_model.py"
    assert f"```python\n{program.read_text()}```" in (ROOT / "README.md").read_text(), (
        "copy the program into the README"
    )
    runpy.run_path(str(program), run_name="__main__")
    said = capsys.readouterr().out
    assert said.startswith("[[") and "decoding: " in said
    assert sum(bool(line.strip()) for line in program.read_text().splitlines()) <= 33  # the README says: short


def test_what_the_guide_does_with_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = re.search(
        r"With the model of that program:\n```python\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.S
    )
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"lamina": lamina, "model": Mine().eval()}
    exec(shown[1], names)
    assert names["result"].cache.lengths.tolist() == [23, 22] and names["coded"].cache.lengths.tolist() == [23]
    assert "[0] tokens were known\n[4] tokens were known\n" in capsys.readouterr().out


def test_learned_positions_are_those_of_the_rows(model: Mine) -> None:
    ids = torch.tensor([[7, 8, 9, 10]])
    x = model.token(ids) + model.position.weight[:4]
    expected = model(ids)
    torch.testing.assert_close(model(embeds=model.token(ids)), expected)  # positions are added to embeddings too
    cache = model.new_cache(2)
    model([[5, 5, 7], [7, 0, 0]], cache=cache, counts=[3, 1])
    cache.rewind([3, 0])
    assert cache.lengths.tolist() == [0, 1]
    model([[7], [8]], cache=cache)
    found = model([[8, 9, 10], [9, 10, 0]], cache=cache, counts=[3, 2])
    assert found is not None and expected is not None
    torch.testing.assert_close(found[0], expected[0, 1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1, :2], expected[0, 2:], rtol=1e-4, atol=1e-5)
    assert not torch.equal(model.add_positions(model.embed(ids), torch.zeros_like(ids)), x)


def test_everything_works_without_a_configuration(model: Mine, tmp_path: Path) -> None:
    assert model.eos_ids == () and model.vocab == 40 and lamina.plan(model, length=20).total > 0
    plain = model.generate(PROMPTS, max_new_tokens=6)
    assert [len(row) for row in plain.tokens] == [6, 6]
    for more in (
        dict(do_sample=True, seed=1),
        dict(num_beams=2),
        dict(prompt_lookup_num_tokens=2),
        dict(use_cache=False),
    ):
        assert len(model.generate(PROMPTS, max_new_tokens=3, **more).tokens) == 2
    cut = model.generate(PROMPTS[:1], max_new_tokens=6, eos_token_id=plain.tokens[0][2])
    assert cut.tokens[0] == plain.tokens[0][:3]
    plain.cache.save(tmp_path / "mine.cache")
    kept = lamina.load_cache(tmp_path / "mine.cache", model)
    again = [model.generate([[9], [9]], max_new_tokens=4, cache=cache).tokens for cache in (kept, plain.cache)]
    assert again[0] == again[1]
    pool = lamina.Pool(model, tokens=200)
    for cache in (
        model.new_cache(2, codec="int8"),
        model.new_cache(2, residence="host"),
        model.new_cache(2, pool=pool),
    ):
        assert len(model.generate(PROMPTS, max_new_tokens=6, cache=cache).tokens) == 2
    store = lamina.PrefixStore(model, bytes=2**20)
    assert [model.generate(PROMPTS[:1], max_new_tokens=6, prefixes=store).reused for _ in range(2)] == [[0], [3]]
    with pytest.raises(lamina.InputError, match="no tokenizer"):
        lamina.Chat(model)
    with pytest.raises(lamina.InputError, match="no tokenizer"):
        model.generate("a text")


def test_a_cache_file_of_other_weights_is_refused(model: Mine, tmp_path: Path) -> None:
    model.generate(PROMPTS, max_new_tokens=2).cache.save(tmp_path / "mine.cache")
    other = copy.deepcopy(model)
    nn.init.zeros_(other.position.weight)
    with pytest.raises(lamina.CacheFileError, match=r"position.weight is the first that differs"):
        lamina.load_cache(tmp_path / "mine.cache", other)


def test_a_config_that_is_an_object_of_ones_own_is_left_alone(model: Mine) -> None:
    other = copy.deepcopy(model)
    other.config = type("Sizes", (), {"eos_token_id": 3})()  # type: ignore[assignment]
    assert other.eos_ids == () and lamina.plan(other, length=8).positions == Mine.max_positions
    assert other.generate(PROMPTS, max_new_tokens=2).tokens == model.generate(PROMPTS, max_new_tokens=2).tokens


def test_laws_hold_up_to_the_last_learned_position() -> None:
    torch.manual_seed(0)
    short = Mine(vocab=20, width=8, heads=1, layers=1)
    short.max_positions, short.position = 8, nn.Embedding(8, 8)
    assert lamina.verify(short.eval(), tries=1)
    cache = short.new_cache(2)
    short([[1] * 8, [2] * 8], cache=cache, counts=[8, 5])
    short([[0], [3]], cache=cache, counts=[0, 1])  # padding of a full row
    with pytest.raises(lamina.CapacityError):
        short([[1], [3]], cache=cache)


def test_a_cache_does_not_keep_the_graphs_of_passes(model: Mine) -> None:
    cache = model.new_cache()
    out = model([[1, 2]], cache=cache)
    assert out is not None and not out.requires_grad
    assert not any(x.requires_grad for x in cache.layers[0]["attention"].data.values())
    alone = model([[1, 2]])
    assert alone is not None and alone.requires_grad  # training goes on without a cache


# -- what is missing is told ------------------------------------------------------------------------------------------


class Wrong(Mine):
    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.ends  # type: ignore[union-attr]

    @cached_property
    def width(self) -> int:
        return self.token.dims  # type: ignore[return-value]


def test_an_error_inside_a_property_is_not_masked() -> None:
    model = Wrong(vocab=20, width=8, heads=1)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'ends'"):
        model.generate(PROMPTS, max_new_tokens=2)
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'dims'"):
        _ = model.width
    with pytest.raises(AttributeError, match="'Wrong' object has no attribute 'breadth'"):
        _ = model.breadth


def test_a_vocabulary_that_cannot_be_seen_must_be_set() -> None:
    class Odd(Mine):
        def unembed(self, x: Any) -> Any:
            return self.head(x.mean(dim=1, keepdim=True).flatten(1, 3))

    odd = Odd(vocab=20, width=8, heads=1)
    with pytest.raises(lamina.InputError, match=r"how many ids Odd has cannot be seen .*: set self.vocab"):
        odd.generate(PROMPTS)
    odd.vocab = 20
    assert odd.vocab == 20
    with pytest.raises(
        lamina.InputError, match=r"cannot be seen from its embed and unembed .Model does not say how ids"
    ):
        _ = lamina.Model().vocab


def test_a_block_that_does_not_say_what_it_remembers_is_named(model: Mine) -> None:
    class Silent(Block):
        @property
        def specs(self) -> Any:  # type: ignore[override]
            return self.memories

        @specs.setter
        def specs(self, value: Any) -> None:
            pass

    other = copy.deepcopy(model)
    other.blocks.append(nn.Linear(16, 16))
    with pytest.raises(
        lamina.InputError, match=r"block 2 \(Linear\) does not say what it remembers: give it specs, such as"
    ):
        other.new_cache()
    other.blocks[2] = Silent(16, 2)
    with pytest.raises(AttributeError, match="'Silent' object has no attribute 'memories'"):
        other.new_cache()
