"""Many callers of one model at once get the tokens of a run alone: on a CPU here, on a GPU by `bench.device_check`."""

from __future__ import annotations

import threading

import pytest
import torch

from bench import many_callers
from lamina.errors import InputError
from lamina.generation.strategies.drafts import early_exit
from tests.families.harness import pair


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_callers, "MORE", 6)
    monkeypatch.setattr(many_callers, "TRIALS", 1)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_threads_tasks_and_interleaved_streams_get_the_tokens_of_a_run_alone(family: str) -> None:
    from tests.families.cases import FIRST

    assert many_callers.many_callers(pair(family, dict(FIRST)[family])[1]) == "yes"


def test_caches_in_codes_and_early_exits_may_be_first_used_by_several_threads() -> None:
    model = pair("llama", "grouped")[1]
    for name in ("_key_means", "_exits"):
        model.__dict__.pop(name, None)
    prompts = [[5, 9, 12, 3], [7, 2]]

    def work(number: int) -> tuple[list[int], list[int]]:
        prompt = [prompts[number % 2]]
        coded = model.generate(prompt, 5, eos_token_id=None, cache=model.new_cache(codec="int8"))
        drafted = model.generate(prompt, 5, eos_token_id=None, assistant_early_exit=1, num_assistant_tokens=3)
        return coded.tokens[0], drafted.tokens[0]

    alone = [work(number) for number in range(2)]
    for name in ("_key_means", "_exits"):
        model.__dict__.pop(name, None)
    found: dict[int, tuple[list[int], list[int]]] = {}
    start = threading.Barrier(6)

    def run(number: int) -> None:
        start.wait()
        found[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: alone[number % 2] for number in range(6)}


def test_an_early_exit_that_is_in_use_stays_as_it_is_when_asked_for_again() -> None:
    model = pair("llama", "grouped")[1]
    first = early_exit(model, 1)
    modules = first._modules
    assert early_exit(model, 1) is first and first._modules is modules
    assert torch.equal(first.embed(torch.tensor([[1]])), model.embed(torch.tensor([[1]])))


def test_one_cache_is_used_by_one_generation_at_a_time() -> None:
    model = pair("llama", "grouped")[1]
    cache = model.new_cache()
    first = model.stream([[5, 6, 7]], 100, cache=cache, eos_token_id=None)
    next(first)
    with pytest.raises(InputError, match=r"another generation is using this cache .* cache\.fork\(\)"):
        model.generate([[8]], 2, cache=cache)
    first.cancel()
    held = cache.tokens[0]
    assert model.generate([[8]], 2, cache=cache, eos_token_id=None).cache.tokens[0][:-2] == [*held, 8]
