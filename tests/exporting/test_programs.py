"""Exported programs give the logits and tokens of eager passes: every kind of layer, ragged, rewound, restarted."""

from __future__ import annotations

import functools

import pytest
import torch

import lamina
from lamina import Cache, CapacityError, InputError, Program, RewindError
from lamina.attention.window import Sliding
from lamina.bench.random_model import random_model
from lamina.exporting.export import Exported
from tests.exporting.stack import (
    CAPACITY,
    CHUNK,
    ROWS,
    Listener,
    Translator,
    attentions,
    recurrences,
    rewindable,
    run_both,
)
from tests.laws.toys import WIDTH, Attend, AttendCross, Highest, Toy, random_ids

MODELS = {"attentions": attentions, "recurrences": recurrences, "rewindable": rewindable}
SLACK = {"attentions": 0, "recurrences": 0, "rewindable": 3}


@functools.cache
def model_of(kind: str) -> Toy:
    return MODELS[kind]()


@functools.cache
def exported(kind: str) -> Exported:
    return lamina.export(model_of(kind), ROWS, CAPACITY, slack=SLACK[kind], chunk=CHUNK)


def fresh(kind: str) -> tuple[Toy, Cache, Program]:
    model = model_of(kind)
    program = Program.of(exported(kind))
    program.reset()
    return model, model.new_cache(ROWS, capacity=CAPACITY, slack=SLACK[kind]), program


@pytest.mark.parametrize("kind", ["attentions", "recurrences"])
def test_every_kind_of_layer_equals_eager_passes_three_times_past_its_window(kind: str) -> None:
    for seed in range(3):
        run_both(*fresh(kind), lengths=CAPACITY, seed=seed)  # windows are at most 6 tokens


def test_a_float32_model_reads_prompts_of_any_length_up_to_hundreds_of_tokens() -> None:
    """For which plain passes on a CPU choose among ways to attend by the number of tokens."""
    shape = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = random_model({"model_type": "llama", "num_key_value_heads": 1, **shape}, torch.float32, "cpu")
    program = Program.of(lamina.export(model, 1, 300, chunk=300))
    for length in (1, 100, 200, 300):
        ids = random_ids(1, length, length)
        program.reset()
        program.feed(ids.tolist())
        expected = model(ids, cache=model.new_cache(), logits="last")
        assert program.logits is not None and expected is not None
        torch.testing.assert_close(program.logits, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_lines_are_rewound_and_restarted() -> None:
    model, cache, program = fresh("attentions")
    run_both(model, cache, program, 3, seed=0)  # no ring has wrapped: all can be dropped
    assert program.rewindable == cache.rewindable.tolist()
    program.rewind([2, 0])
    cache.rewind([2, 0])
    run_both(model, cache, program, 20, seed=1)
    assert program.rewindable == cache.rewindable.tolist() == [0, 0]
    with pytest.raises(RewindError, match="row 0 cannot be rewound by 1: of its 21 tokens, 0 can be dropped"):
        program.rewind(1)
    program.reset([1])
    cache.reset([1])
    run_both(model, cache, program, 10, seed=2)


def test_states_and_rings_are_rewound_within_the_slack() -> None:
    model, cache, program = fresh("rewindable")
    for seed in range(3):
        run_both(model, cache, program, 9, seed=seed)
        back = [min(n, seed + 1) for n in program.rewindable]
        assert program.rewindable == cache.rewindable.tolist()
        assert any(back)
        program.rewind(back)
        cache.rewind(back)
    run_both(model, cache, program, 9, seed=9)


def test_one_row_of_a_ring_and_of_a_kind_from_outside() -> None:
    """One row is traced in other ways than several: sizes of 1 are dropped. The kind has a limit of its own."""
    model = Toy(Attend(Sliding(4)), Highest())
    program, cache = Program.of(lamina.export(model, 1, CAPACITY, chunk=CHUNK)), model.new_cache(1, capacity=CAPACITY)
    run_both(model, cache, program, 20, seed=0)
    assert program.rewindable == cache.rewindable.tolist() == [0]


def test_states_alone_have_no_longest_row() -> None:
    assert exported("recurrences").manifest.limit is None
    model, cache, program = fresh("recurrences")
    with pytest.raises(CapacityError):
        run_both(model, cache, program, CAPACITY + 5, seed=0)  # the eager cache has a capacity; the program goes on
    program.reset()
    program.feed([[1] * (CAPACITY + 5)] * ROWS)
    assert program.lengths == [CAPACITY + 5] * ROWS


def test_a_source_is_encoded_and_attached_row_by_row_and_layers_have_their_codecs() -> None:
    model, codec = Translator(AttendCross(), Attend(), Attend()), {0: "int8", 1: "int4", 2: "fp8"}
    made = lamina.export(model, ROWS, CAPACITY, codec=codec, chunk=CHUNK, source=9)
    program, cache = Program.of(made), model.new_cache(ROWS, capacity=CAPACITY, codec=codec)
    with pytest.raises(InputError, match="row 0 has no source"):
        program.feed([[1], [1]])
    sources = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 9, 3)]
    program.encode(sources[:2])
    cache.attach(model.encode([sources[0]]), rows=[0]).attach(model.encode([sources[1]]), rows=[1])
    run_both(model, cache, program, 12, seed=0)
    program.reset([0])
    program.encode([sources[2], []])  # row 1 keeps its own
    cache.reset([0]).attach(model.encode([sources[2]]), rows=[0])
    run_both(model, cache, program, 12, seed=1)
    with pytest.raises(InputError, match="row 1 has the id 13: ids are 0 to 12"):
        program.encode([[1], [13]])
    with pytest.raises(CapacityError, match="the source is 10 long, and the program was exported for 9"):
        program.encode([[1] * 10, [1]])


def test_features_are_encoded_for_rows_that_continue_from_the_start_ids() -> None:
    model = Listener(AttendCross())
    program = Program.of(lamina.export(model, 3, 12, chunk=3, source=5))
    features = torch.randn(2, WIDTH, 8, dtype=torch.float64)  # of at most 10 frames; the third row stays empty
    found = program.generate(features, 6, counts=[8, 3]).tokens
    for row, n in enumerate([8, 3]):
        cache, ids = model.new_cache(1, source=model.encode(features=features[row : row + 1, :, :n])), [1]
        for _ in range(6):
            logits = model(torch.tensor([ids[-1:]]), cache=cache, logits="last")
            assert logits is not None
            ids.append(int(logits.argmax()))
        assert ids[1:] == found[row]
    with pytest.raises(InputError, match=r"counts=\[9, 3, 0\]: each must be between 0 and the 8 features of a row"):
        program.generate(features, 6, counts=[9, 3])
    with pytest.raises(InputError, match="the source of Listener is features, not text or ids: give"):
        program.generate([[1, 2]])
    with pytest.raises(CapacityError, match="the source is 11 long, and the program was exported for 10"):
        program.encode(torch.zeros(3, WIDTH, 11))
    with pytest.raises(InputError, match=r"encode takes given float64 \[3, 8, 10\], not float64 \[3, 7, 10\]"):
        program.encode(torch.zeros(3, WIDTH - 1, 10))
    with pytest.raises(InputError, match=r"encode takes given float64 \[3, 8, 10\], not float64 \[\]"):
        program.encode(torch.tensor(1.0))
    with pytest.raises(InputError, match=r"encode takes counts int64 \[3\], not int64 \[2\]"):
        program.encode(torch.zeros(3, WIDTH, 10), [10, 10])
    with pytest.raises(InputError, match="prompt 1 is empty: give at least one token, or one frame of features"):
        program.generate(features, 6, counts=[8, 0])
    program.reset()
    with pytest.raises(InputError, match="row 0 has no source: give each row one with encode"):
        program.call("decode", torch.ones(3, 1, dtype=torch.int64), torch.tensor([1, 0, 0]))


def test_what_does_not_fit_is_refused_by_name() -> None:
    _, _, program = fresh("attentions")
    with pytest.raises(CapacityError, match="row 1 holds 0 tokens and 41 more were given, but the program has room"):
        program.feed([[1], [1] * (CAPACITY + 1)])
    with pytest.raises(InputError, match=r"decode takes ids int64 \[2, 1\], not int64 \[2, 3\]"):
        program.call("decode", torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    with pytest.raises(InputError, match=r"prefill takes ids int64 \[2, 2 to 7\], not int64 \[2, 8\]"):
        program.call("prefill", torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    with pytest.raises(InputError, match="row 0 has the id 13: ids are 0 to 12"):
        program.feed([[13], [1]])
    with pytest.raises(InputError, match="3 rows of ids were given, and the program has 2"):
        program.feed([[1], [1], [1]])
    assert program.lengths == [0, 0]


def test_prompts_without_tokens_and_ids_that_are_no_integers_are_refused() -> None:
    _, _, program = fresh("attentions")
    with pytest.raises(InputError, match="prompt 1 is empty: give at least one token"):
        program.generate([[1], []], 3)
    with pytest.raises(InputError, match="max_new_tokens=0: it must be at least 1"):
        program.generate([[1]], 0)
    with pytest.raises(InputError, match=r"ids of row 1=\[1.5\]: they must be whole numbers"):
        program.feed([[1], [1.5]])  # type: ignore[list-item]
    with pytest.raises(InputError, match="ids of row 0='12': they must be whole numbers"):
        program.feed(["12", []])  # type: ignore[list-item]
    assert program.feed([[], []]).tolist() == [-1, -1]
    found = program.feed([[], [3]]).tolist()
    assert found[0] == -1 and found[1] >= 0 and program.lengths == [0, 1]
    assert program.feed([[], []]).tolist() == found


def test_arguments_of_export_are_checked() -> None:
    model = model_of("attentions")
    with pytest.raises(InputError, match="chunk=41: a prefill program of this model and capacity takes 3 to 40 tokens"):
        lamina.export(model, 1, CAPACITY, chunk=41)
    with pytest.raises(InputError, match="capacity=2: a program needs room for at least 3 tokens a row"):
        lamina.export(model, 1, 2)
    with pytest.raises(InputError, match="source=5: Toy reads no source"):
        lamina.export(model, 1, CAPACITY, source=5)
    with pytest.raises(InputError, match="target='tflite': it must be one of"):
        lamina.export(model, 1, CAPACITY, target="tflite")
