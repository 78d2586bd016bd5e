"""T5, encoder and decoder: transformers' states and logits, and what the verbs of a cache do with its source."""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import T5Config, T5ForConditionalGeneration

import lamina
from lamina.attention import Full
from lamina.cache import Source, Step
from lamina.config import Config
from lamina.errors import InputError
from lamina.generation.prompt import from_padded, from_rows
from lamina.models import family_of
from lamina.models.t5 import LARGEST, T5
from lamina.nn import RelativeBias
from tests.families.encoder_decoder_cases import T5_SIZES
from tests.families.harness import TOLERANCE, random_cuts, random_ids, relative, run_in_pieces, run_ragged

LENGTH = 40

CASES: dict[str, dict[str, Any]] = {
    "tied": dict(),
    "gated, unscaled, wide heads": dict(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_heads=3, d_kv=16, num_decoder_layers=3
    ),
    "own head, few buckets, gated silu": dict(
        feed_forward_proj="gated-silu", relative_attention_num_buckets=6, relative_attention_max_distance=9,
        own_head=True,
    ),
}  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)
FIRST = "tied"


@functools.cache
def pair(name: str) -> tuple[Any, T5]:
    """A random model of transformers in float32, and ours loaded from what it saved."""
    torch.manual_seed(0)
    settings = T5_SIZES | CASES[name]
    own_head = settings.pop("own_head", False)
    theirs = T5ForConditionalGeneration(T5Config(**settings)).eval()
    if own_head:
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(67, 32))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lamina.load(folder, device="cpu")
    assert isinstance(ours, T5)
    return theirs, ours


@torch.no_grad()
def encoded(theirs: Any, ids: Tensor) -> Tensor:
    """One row's encoder states. ids [S] -> [S, width]"""
    return theirs.encoder(ids[None]).last_hidden_state[0]


@torch.no_grad()
def truth(theirs: Any, source: Tensor, target: Tensor) -> Tensor:
    """One row in one uncached pass. source [S], target [T] -> [T, vocab]"""
    return theirs(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]


def random_rows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    return [random_ids(1, length, 67, seed=seed + r)[0] for r, length in enumerate(lengths)]


def encode_rows(model: T5, rows: list[Tensor]) -> Source:
    prompt = from_rows([row.tolist() for row in rows])
    return model.encode(prompt.ids, prompt.counts)


def check(theirs: Any, found: Tensor | None, sources: list[Tensor], targets: list[Tensor]) -> None:
    """found [B, T, vocab] against each row alone"""
    assert found is not None and len(found) == len(sources) == len(targets)
    for logits, source, target in zip(found, sources, targets, strict=True):
        assert relative(logits[: len(target)], truth(theirs, source, target)) < TOLERANCE


# -- logits ------------------------------------------------------------------------------------------------------------


@every_case
def test_the_encoder_gives_the_same_states_for_rows_of_any_length(name: str) -> None:
    theirs, ours = pair(name)
    rows = random_rows([LENGTH, 1, 17])
    source = encode_rows(ours, rows)
    assert source.lengths.tolist() == [LENGTH, 1, 17]
    for row, states in zip(rows, source.states, strict=True):
        assert relative(states[: len(row)], encoded(theirs, row)) < TOLERANCE
    assert relative(ours.encode(rows[0][None]).states[0], encoded(theirs, rows[0])) < TOLERANCE


@every_case
def test_one_pass_without_a_cache_gives_the_same_logits(name: str) -> None:
    theirs, ours = pair(name)
    sources, targets = random_rows([23, 23]), random_rows([LENGTH, LENGTH], seed=5)
    source = ours.encode(torch.stack(sources))
    check(theirs, ours(torch.stack(targets), source=source), sources, targets)


def test_ragged_targets_without_a_cache_equal_each_row_alone() -> None:
    theirs, ours = pair(FIRST)
    sources, targets = random_rows([9, 31, 1]), random_rows([LENGTH, 3, 20], seed=5)
    prompt = from_rows([row.tolist() for row in targets])
    check(theirs, ours(prompt.ids, counts=prompt.counts, source=encode_rows(ours, sources)), sources, targets)


@every_case
def test_twenty_random_cuts_give_the_same_logits(name: str) -> None:
    theirs, ours = pair(name)
    sources, targets = random_rows([30, 11]), random_rows([LENGTH, LENGTH], seed=5)
    expected = torch.stack([truth(theirs, *row) for row in zip(sources, targets, strict=True)])
    source = encode_rows(ours, sources)
    for seed in range(20):
        rng = random.Random(seed)
        cache = ours.new_cache(
            2, capacity=rng.choice([None, LENGTH, 2 * LENGTH]), slack=rng.choice([0, 2]), source=source
        )
        cache.poison()
        found = run_in_pieces(ours, torch.stack(targets), cache, random_cuts(LENGTH, rng))
        assert relative(found, expected) < TOLERANCE, seed


@every_case
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_ragged_rows_with_ragged_sources_equal_themselves_alone(name: str, rows: int) -> None:
    theirs, ours = pair(name)
    rng = random.Random(rows)
    sources = random_rows([rng.randint(1, 30) for _ in range(rows)])
    targets = random_rows([rng.randint(1, LENGTH) for _ in range(rows)], seed=9)
    cache = ours.new_cache(rows, source=encode_rows(ours, sources))
    for source, target, logits in zip(sources, targets, run_ragged(ours, targets, cache, rng), strict=True):
        assert relative(logits, truth(theirs, source, target)) < TOLERANCE


def test_a_left_padded_source_with_its_mask_equals_each_row_alone() -> None:
    theirs, ours = pair(FIRST)
    ids, targets = random_ids(3, 21, 67), random_rows([6, 6, 6], seed=5)
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 4, 17]):
        mask[row, :padding] = 0
    prompt = from_padded(ids, mask)
    found = ours(torch.stack(targets), cache=ours.new_cache(3, source=ours.encode(prompt.ids, prompt.counts)))
    check(theirs, found, [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)], targets)


def test_one_source_serves_many_rows() -> None:
    theirs, ours = pair(FIRST)
    sources, targets = random_rows([13]), random_rows([8, 8, 8], seed=5)
    source = encode_rows(ours, sources)
    check(theirs, ours(torch.stack(targets), source=source), sources * 3, targets)
    check(theirs, ours(torch.stack(targets), cache=ours.new_cache(3, source=source)), sources * 3, targets)


def test_an_encoder_pass_sees_both_ways_within_each_packed_sequence() -> None:
    theirs, ours = pair(FIRST)
    rows = random_rows([5, 1, 14])
    segments = torch.tensor([[0] * 5 + [1] + [2] * 14])
    states = ours.encoder(torch.cat(rows)[None], segments=segments)
    assert relative(states[0], torch.cat([encoded(theirs, row) for row in rows])) < TOLERANCE
    step = Step.alone([], (1, 4), torch.device("cpu"), torch.tensor([3]), causal=False)
    assert step.view_of_new(Full()).mask()[0, 0].tolist() == [[True, True, True, False]] * 4


def test_greedy_generation_reads_the_prompts_as_sources() -> None:
    theirs, ours = pair(FIRST)
    assert ours.start_ids == (0,)
    sources = random_rows([12, 5])
    result = ours.generate([row.tolist() for row in sources], max_new_tokens=12, eos_token_id=[])
    for row, tokens in zip(sources, result.tokens, strict=True):
        made = theirs.generate(row[None], max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None)
        assert tokens == made[0, 1:].tolist()


# -- the source in a cache ---------------------------------------------------------------------------------------------


def begun(seed: int = 0) -> tuple[Any, T5, list[Tensor], list[Tensor], lamina.Cache]:
    """Three rows, 4 of their 12 tokens fed."""
    theirs, ours = pair(FIRST)
    sources, targets = random_rows([7, 19, 3], seed), random_rows([12, 12, 12], seed + 5)
    cache = ours.new_cache(3, source=encode_rows(ours, sources), slack=4)
    ours(torch.stack(targets)[:, :4], cache=cache)
    return theirs, ours, sources, targets, cache


def check_rest(
    theirs: Any, ours: T5, sources: list[Tensor], targets: list[Tensor], cache: lamina.Cache, rows: list[int]
) -> None:
    """Feeds the rest of these rows' targets and compares."""
    found = ours(torch.stack([targets[row][4:] for row in rows]), cache=cache.poison())
    assert found is not None
    for row, logits in zip(rows, found, strict=True):
        assert relative(logits, truth(theirs, sources[row], targets[row])[4:]) < TOLERANCE


@pytest.mark.parametrize("verb", ["select", "repeat", "fork", "join"])
def test_rows_take_their_source_along(verb: str) -> None:
    theirs, ours, sources, targets, cache = begun()
    if verb == "select":
        check_rest(theirs, ours, sources, targets, cache.select([2, 0, 2]), [2, 0, 2])
    elif verb == "repeat":
        check_rest(theirs, ours, sources, targets, cache.repeat(2), [0, 0, 1, 1, 2, 2])
    elif verb == "fork":
        child = cache.fork()
        cache.reset()
        check_rest(theirs, ours, sources, targets, child, [0, 1, 2])
    else:
        _, _, more_sources, more_targets, other = begun(seed=50)
        both = lamina.Cache.join([cache.select([2]), other, *cache.split()])
        rows = [2, 3, 4, 5, 0, 1, 2]
        check_rest(theirs, ours, sources + more_sources, targets + more_targets, both, rows)


def test_rewinding_leaves_the_source() -> None:
    theirs, ours, sources, targets, cache = begun()
    cache.rewind([4, 2, 1])
    ours(random_ids(3, 3, 67), cache=cache)
    cache.rewind(3)
    rows = [target[at:] for target, at in zip(targets, [0, 2, 3], strict=True)]
    for row, (at, logits) in enumerate(zip([0, 2, 3], run_ragged(ours, rows, cache, random.Random(0)), strict=True)):
        assert relative(logits, truth(theirs, sources[row], targets[row])[at:]) < TOLERANCE


def test_a_reset_row_has_no_source_until_one_is_attached_and_its_neighbours_go_on() -> None:
    theirs, ours, sources, targets, cache = begun()
    cache.reset([1])
    ids = torch.stack(targets)
    with pytest.raises(InputError, match=r"row 1 has none.*rows=\[1\]"):
        ours(ids[:, 4:6], cache=cache)
    assert cache.lengths.tolist() == [4, 0, 4]
    found = ours(ids[:, 4:6], cache=cache, counts=[2, 0, 2])
    for row in (0, 2):
        assert relative(found[row], truth(theirs, sources[row], targets[row])[4:6]) < TOLERANCE
    longer = random_rows([33], seed=70)
    cache.attach(encode_rows(ours, longer), rows=[1]).poison()
    found = run_ragged(ours, [ids[0, 6:], ids[1], ids[2, 6:]], cache, random.Random(1))
    for row, (source, start) in enumerate([(sources[0], 6), (longer[0], 0), (sources[2], 6)]):
        assert relative(found[row], truth(theirs, source, targets[row])[start:]) < TOLERANCE


def test_only_the_rows_that_have_a_source_need_one() -> None:
    theirs, ours = pair(FIRST)
    sources, target = random_rows([9, 4]), random_rows([5], seed=5)[0]
    cache = ours.new_cache(3).attach(encode_rows(ours, sources), rows=[2, 0])
    step = cache.step(5, rows=[0, 2])
    found = ours.forward(target.expand(2, -1), step)
    step.commit()
    check(theirs, found, sources[::-1], [target, target])
    with pytest.raises(InputError, match="row 1 has none"):
        cache.step(1)


# -- parts and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (6, 9), (4, 50)])
def test_every_distance_falls_into_the_bucket_that_transformers_gives_it(
    both_ways: bool, buckets: int, farthest: int
) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    bias = RelativeBias(1, buckets, farthest, both_ways=both_ways)
    bias.weight.data = torch.arange(buckets)[:, None].float()
    kv = torch.arange(400)
    expected = T5Attention._relative_position_bucket(kv - 200, both_ways, buckets, farthest)
    found = bias(torch.tensor(0), torch.tensor(200), kv)
    assert found.tolist() == expected.tolist()


def test_a_head_of_its_own_is_loaded_though_the_configuration_says_tied() -> None:
    _, ours = pair("own head, few buckets, gated silu")
    assert ours.config.tie_word_embeddings
    assert ours.head.weight is not ours.embedding.weight
    assert pair(FIRST)[1].head.weight is pair(FIRST)[1].embedding.weight


def test_compiled_decoding_is_one_graph_whatever_the_lengths() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    theirs, ours = pair(FIRST)
    sources, targets = random_rows([9, 4]), torch.stack(random_rows([24, 24], seed=5))
    for tokens in (1, 4):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        forward = torch.compile(ours.forward, fullgraph=True, backend=counter)
        cache = ours.new_cache(2, capacity=32, source=encode_rows(ours, sources))
        outs = []
        for ids in targets.split(tokens, dim=1):
            step = cache.step(tokens)
            outs.append(forward(ids, step))
            step.commit()
        check(theirs, torch.cat(outs, dim=1), sources, list(targets))
        assert counter.frame_count == 1


class Sizes(TorchDispatchMode):
    """The number of elements of every tensor that an operation allocates: those in memory that it was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.made.append((str(function), x.numel()))
        return out


@pytest.mark.parametrize("lengths", [[30, 30], [30, 11]], ids=["one length", "ragged"])
def test_a_decode_step_does_not_copy_the_keys_of_the_source(lengths: list[int]) -> None:
    _, ours = pair(FIRST)
    cache = ours.new_cache(2, source=encode_rows(ours, random_rows(lengths)))
    ours(random_ids(2, 3, 67), cache=cache)
    layer = cache.layers[0]["source"]
    keys = layer.data["k"].numel()
    with Sizes() as sizes:
        ours(random_ids(2, 1, 67), cache=cache.poison())
    own = [(name, size) for name, size in sizes.made if size >= keys]
    assert sizes.made and not own, own
    assert keys > 67 * 2, "which is more than anything else that a step makes"


def test_padding_of_a_source_may_hold_anything() -> None:
    theirs, ours = pair(FIRST)
    sources, target = random_rows([9, 4]), random_ids(1, 3, 67)[0]
    source = encode_rows(ours, sources)
    source.states[1, 4:] = float("nan")
    for codec in (None, "fp8", "int8"):
        cache = ours.new_cache(2, source=source, codec=codec)
        found = ours(target.expand(2, -1), cache=cache)
        assert found is not None and bool(found.isfinite().all())
        if codec is None:
            check(theirs, found, sources, [target, target])


@functools.cache
def overflowing() -> tuple[Any, T5]:
    """A model of transformers in float16 whose hidden states grow beyond float16, and ours with the same weights."""
    theirs, _ = pair(FIRST)
    theirs = copy.deepcopy(theirs)
    with torch.no_grad():
        for stack in (theirs.encoder, theirs.decoder):
            for i, block in enumerate(stack.block):
                block.layer[-1].DenseReluDense.wo.weight.mul_(8000)
                if i == 0:
                    block.layer[0].SelfAttention.o.weight.mul_(60000)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = lamina.load(folder, device="cpu", dtype=torch.float16)
    assert isinstance(ours, T5)
    return theirs.half(), ours


def test_states_that_overflow_float16_are_cut_off_as_transformers_does_it() -> None:
    theirs, ours = overflowing()
    source, target = random_ids(1, 12, 67), random_ids(1, 6, 67, seed=1)
    states = encoded(theirs, source[0])
    seen: list[Tensor] = []
    for block in (*ours.encoder.blocks, *ours.blocks):
        block.register_forward_hook(lambda block, given, out: seen.append(out))
    found = ours.encode(source)
    logits = ours(target, source=found)
    assert logits is not None
    for block in (*ours.encoder.blocks, *ours.blocks):
        block._forward_hooks.clear()
    cut = [bool((x.abs() == torch.tensor(LARGEST).half()).any()) for x in seen]
    assert any(cut[:2]) and any(cut[2:]), "nothing has overflowed"
    assert relative(found.states[0].float(), states.float()) < 2e-2
    assert relative(logits[0].float(), truth(theirs, source[0], target[0]).float()) < 2e-2
    cache = ours.new_cache(source=found)
    pieces = [ours(target[:, :2], cache=cache), *(ours(target[:, i : i + 1], cache=cache) for i in range(2, 6))]
    assert relative(torch.cat(pieces, dim=1).float(), logits.float()) < 2e-2  # type: ignore[arg-type]


def test_verify_finds_nothing_wrong() -> None:
    report = lamina.verify(pair(FIRST)[1])
    assert report.ok, str(report)


def test_errors_say_what_is_wrong_and_change_nothing() -> None:
    _, ours = pair(FIRST)
    ids, source = random_ids(2, 5, 67), encode_rows(pair(FIRST)[1], random_rows([4, 6, 5]))
    with pytest.raises(InputError, match="reads a source, and none is attached"):
        ours(ids)
    cache = ours.new_cache(2)
    with pytest.raises(InputError, match="row 0 has none"):
        ours(ids, cache=cache)
    with pytest.raises(InputError, match="the source has 3 rows, and 2 rows of ids"):
        ours(ids, source=source)
    with pytest.raises(InputError, match="the source has 3 rows and is attached to 2 rows"):
        cache.attach(source)
    with pytest.raises(InputError, match="there is no row 7"):
        cache.attach(source, rows=[0, 1, 7])
    with pytest.raises(InputError, match="a cache holds its source"):
        ours(ids, cache=cache, source=source)
    assert cache.lengths.tolist() == [0, 0]
    with pytest.raises(InputError, match="id 67 at row 0, token 1"):
        ours.encode([[1, 67]])
    with pytest.raises(InputError, match="counts of row 1 is 6"):
        ours.encode(ids, counts=[5, 6])
    with pytest.raises(InputError, match="row 1 of the source is empty"):
        ours.encode(ids, counts=[5, 0])
    with pytest.raises(InputError, match="feed_forward_proj='gated-tanh'"):
        T5.build(ours.config.with_values(feed_forward_proj="gated-tanh"))


def test_relatives_scale_the_input_of_the_head_as_their_configurations_say() -> None:
    sizes = dict(d_model=16, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=11, num_experts=2)
    expected = {"t5": (0.25, 1.0), "mt5": (1.0, 1.0), "umt5": (0.25, 1.0), "switch_transformers": (0.25, 1.0)}
    for family, (tied, untied) in expected.items():
        for value, scale in ((True, tied), (False, untied)):
            config = Config({"model_type": family, "tie_word_embeddings": value, "num_decoder_layers": 1} | sizes)
            assert family_of(config).build(config).scale == scale, (family, value)


def test_options_that_contradict_each_other_or_drop_every_token_are_named() -> None:
    config = pair(FIRST)[1].config
    with pytest.raises(InputError, match="feed_forward_proj='relu' in the configuration contradicts is_gated_act=True"):
        T5.build(config.with_values(is_gated_act=True))
    sparse = config.with_values(model_type="switch_transformers", num_experts=2, decoder_sparse_step=1)
    for name, value in (("expert_capacity", 0), ("router_dtype", "bfloat16")):
        with pytest.raises(InputError, match=f"{name}={value!r}"):
            family_of(sparse).build(sparse.with_values(**{name: value}))
