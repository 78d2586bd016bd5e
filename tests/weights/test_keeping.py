"""Checkpoints whose weights stay packed: the same logits as dequantized, without copies, in bounded memory."""

from __future__ import annotations

import gguf
import pytest
import torch

import lamina
from lamina.checkpoint.packing import row_order, runs
from lamina.errors import CheckpointError, InputError
from lamina.weights import JoinedWeight, Packed, named_weights, packed_formats, weight_bytes
from lamina.weights.gguf_blocks import GGUFFormat
from tests.checkpoint.test_gguf import Kind, llama_arrays, stored_order, write
from tests.families.harness import relative
from tests.weights.test_formats import GGUF, random_parts

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def gguf_file(path, formats):
    """A small llama whose matrices have random blocks; formats: of each matrix in turn."""
    arrays = stored_order(llama_arrays())
    matrices = {name: array for name, array in arrays.items() if array.ndim == 2}
    blocks = {}
    for i, (name, array) in enumerate(matrices.items()):
        kind = formats[i % len(formats)]
        data = random_parts(kind, *array.shape, seed=i)["blocks"].numpy()
        blocks[name] = data, gguf.GGMLQuantizationType[kind]
    return write(path, {n: a for n, a in arrays.items() if a.ndim == 1}, quantized=blocks)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("mixed") / "m.gguf", ["Q4_K", "Q6_K", "Q8_0"])


def tokens(model, steps=64):
    """What the best token is, 64 times, by decode steps as `generate` runs them."""
    return model.generate(IDS[:, :4].tolist(), max_new_tokens=steps, do_sample=False, eos_token_id=None).tokens


def test_the_demo_model_writes_what_its_dequantized_twin_writes_in_64_steps():
    packed = lamina.load("smollm2", device="cpu", activations="float32")
    plain = lamina.load("smollm2", dtype=packed.dtype, device="cpu", weights="plain")
    assert set(packed_formats(packed)) == {"Q8_0", "Q4_1"} and tokens(packed) == tokens(plain)
    with torch.no_grad():
        assert relative(packed(IDS), plain(IDS)) < 1e-4


@pytest.mark.parametrize("name", GGUF)
def test_packed_logits_are_those_of_the_dequantized_model(name, tmp_path):
    path = gguf_file(tmp_path / "m.gguf", [name])
    packed, plain = lamina.load(path, device="cpu"), lamina.load(path, device="cpu", weights="plain")
    assert list(packed_formats(packed)) == [name] and not packed_formats(plain)
    with torch.no_grad():
        assert relative(packed(IDS), plain(IDS)) < 0.2  # int8 activations
        packed.activations = "float32"
        assert relative(packed(IDS), plain(IDS)) < 1e-5
    assert tokens(packed) == tokens(plain)
    matrices = {name: one for name, one in named_weights(packed) if isinstance(one, Packed)}
    for path, one in matrices.items():
        assert torch.equal(one.dense(), plain.get_parameter(path)), path


def test_formats_may_differ_from_tensor_to_tensor(mixed):
    packed, plain = lamina.load(mixed, device="cpu"), lamina.load(mixed, device="cpu", weights="plain")
    assert set(packed_formats(packed)) == {"Q4_K", "Q6_K", "Q8_0"}
    assert isinstance(packed.blocks[0].attention.qkv.weight, JoinedWeight)
    packed.activations = "float32"
    with torch.no_grad():
        assert relative(packed(IDS), plain(IDS)) < 1e-5
    new = [model.generate(IDS[:, :4].tolist(), max_new_tokens=16, do_sample=False).tokens for model in (packed, plain)]
    assert new[0] == new[1]


def test_blocks_stay_on_the_memory_map_and_permuted_rows_alone_are_copied(mixed):
    model = lamina.load(mixed, device="cpu")
    gate_up = model.blocks[0].mlp.gate_up.weight
    assert not gate_up.segments[0].blocks.untyped_storage().resizable()  # of NumPy's map, not PyTorch's own
    q, _, v = model.blocks[0].attention.qkv.weight.segments
    assert q.blocks.untyped_storage().resizable() and not v.blocks.untyped_storage().resizable()
    assert weight_bytes(model) <= mixed.stat().st_size
    assert lamina.plan(mixed, length=8).weights == lamina.plan(model, length=8).weights
    found = lamina.inspect(mixed)
    assert found.weight_bytes == weight_bytes(model) and found.packed == packed_formats(model)
    assert "packed: Q4_K (" in str(found)


def test_no_more_than_one_block_of_rows_is_dequantized_at_a_time(mixed, monkeypatch):
    model, most = lamina.load(mixed, device="cpu"), []
    whole = GGUFFormat.dequantize
    monkeypatch.setattr("lamina.weights.packed.AT_ONCE", 128 * 256)
    monkeypatch.setattr(
        GGUFFormat, "dequantize", lambda *given: most.append(given[2][0] * given[2][1]) or whole(*given)
    )
    with torch.no_grad():
        model(IDS)
    assert most and max(most) <= 128 * 512


def test_kinds_that_are_not_kept_are_dequantized_with_a_notice(tmp_path, caplog):
    arrays = stored_order(llama_arrays())
    kind = gguf.GGMLQuantizationType.TQ2_0
    data = gguf.quantize(arrays.pop("blk.0.ffn_down.weight"), kind)
    with caplog.at_level("INFO", logger="lamina"):
        path = write(tmp_path / "m.gguf", arrays, Kind.Q8_0, quantized={"blk.0.ffn_down.weight": (data, kind)})
        model = lamina.load(path, device="cpu")
    assert "weights in TQ2_0 are dequantized; these stay packed" in caplog.text
    assert isinstance(model.blocks[0].mlp.down.weight, torch.nn.Parameter)
    assert isinstance(model.blocks[1].mlp.down.weight, Packed)


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_plain_checkpoints_are_quantized_while_they_are_read(weights, tmp_path):
    path = write(tmp_path / "m.gguf", stored_order(llama_arrays()), Kind.F32)
    model, plain = lamina.load(path, device="cpu", weights=weights), lamina.load(path, device="cpu")
    assert not packed_formats(plain) and weight_bytes(model) < weight_bytes(plain) / (2 if weights == "int8" else 1.9)
    for name, one in named_weights(model):
        if isinstance(one, Packed):
            wanted = plain.get_parameter(name)
            assert (one.dense() - wanted).norm() < 0.1 * wanted.norm()
    ends = model.embedding.weight.format
    assert str(ends) == ("fp8, a scale for a row" if weights == "fp8" else "int8, groups of 32")
    assert model.blocks[0].mlp.down.weight.format.name == weights
    assert lamina.plan(path, length=8, weights=weights).weights == lamina.plan(model, length=8).weights


def test_what_weights_may_be(mixed):
    with pytest.raises(
        InputError, match="must be one of 'packed', 'plain', 'fp8', 'int8', 'int4'; Q4_K is read, not written"
    ):
        lamina.load(mixed, weights="Q4_K")
    with pytest.raises(InputError, match="weights='int3' must be one of"):
        lamina.load(mixed, weights="int3")


def test_transforms_that_move_rows_are_recognized():
    def cut(t):
        return t[2:5]

    assert row_order(cut, [(8, 4)]).tolist() == [2, 3, 4]
    assert row_order(lambda a, b: torch.cat([b, a.flip(0)]), [(2, 4), (3, 4)]).tolist() == [2, 3, 4, 1, 0]
    assert row_order(lambda t: torch.cat((t[:, ::2], t[:, 1::2]), 1), [(3, 4, 8)]).tolist() == [0, 2, 1, 3]
    assert row_order(lambda t: t.transpose(1, 2).transpose(1, 2), [(3, 4, 8)]).tolist() == [0, 1, 2, 3]
    for other in (lambda t: t - 1, lambda t: t.T, lambda t: t[:, :2], lambda t: t.roll(1, 1), lambda t: t.float() / 3):
        assert row_order(other, [(4, 4)]) is None
    assert row_order(lambda t: t.roll(1, 0), [(3, 4, 8)]) is None  # experts in another order
    assert row_order(lambda t: t.flatten(0, 1), [(3, 4, 8)]) is None
    found = runs(torch.tensor([4, 5, 0, 2], dtype=torch.int32), [3, 3])
    assert [(k, r if isinstance(r, slice) else r.tolist()) for k, r in found] == [(1, slice(1, 3)), (0, [0, 2])]


def test_a_file_that_is_cut_short_names_the_tensor(mixed, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(mixed.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"is cut short or not a GGUF file: blk\.1\.ffn_down\.weight goes past its end"
    ):
        lamina.load(short)
