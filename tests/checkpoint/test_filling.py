from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lamina import CheckpointError
from lamina.checkpoint import From, Stack, fill, open_source
from lamina.checkpoint import progress as progress_module
from lamina.checkpoint.names import find_recipes
from lamina.checkpoint.progress import Bar

WIDTH, LAYERS, EXPERTS, VOCAB = 4, 2, 3, 7


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 6, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 3))


class Mixer(nn.Module):
    keep_float32 = frozenset({"A"})

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.empty(WIDTH))
        self.D = nn.Parameter(torch.empty(WIDTH))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.register_buffer("frequencies", torch.arange(WIDTH) * 0.5, persistent=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 8)
        self.mixer = Mixer()
        self.experts = Experts()
        self.rotary = Rotary()
        self.register_buffer("correction", torch.zeros(EXPERTS, dtype=torch.float64))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight


NAMES = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "blocks.{i}": "model.layers.{i}",
    "blocks.{i}.norm": "model.layers.{i}.input_layernorm",
    "blocks.{i}.qkv": tuple(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "qkv"),
    "blocks.{i}.mixer.A": From("model.layers.{i}.mixer.A_log", lambda t: -t.float().exp()),
    "blocks.{i}.experts.gate_up": Stack(
        (
            "model.layers.{i}.experts.{e}.gate.weight",
            From("model.layers.{i}.experts.{e}.up.weight", torch.neg),
        )
    ),
    "blocks.{i}.experts.down": Stack("model.layers.{i}.experts.{e}.down.weight"),
}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {
        "model.embed_tokens.weight": torch.randn(VOCAB, WIDTH),
        "lm_head.weight": torch.randn(VOCAB, WIDTH),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for leaf in ("weight", "bias"):
            made[f"{layer}input_layernorm.{leaf}"] = torch.randn(WIDTH)
            for x, rows in (("q", 4), ("k", 2), ("v", 2)):
                shape = (rows, WIDTH) if leaf == "weight" else (rows,)
                made[f"{layer}self_attn.{x}_proj.{leaf}"] = torch.randn(shape)
        made[f"{layer}mixer.A_log"] = torch.randn(WIDTH)
        made[f"{layer}mixer.D"] = torch.randn(WIDTH)
        made[f"{layer}correction"] = torch.randn(EXPERTS)
        for e in range(EXPERTS):
            made[f"{layer}experts.{e}.gate.weight"] = torch.randn(3, WIDTH)
            made[f"{layer}experts.{e}.up.weight"] = torch.randn(3, WIDTH)
            made[f"{layer}experts.{e}.down.weight"] = torch.randn(WIDTH, 3)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def on_meta(tied: bool = False) -> Model:
    with torch.device("meta"):
        return Model(tied)


@pytest.mark.parametrize("shards", [0, 3])
def test_plain_merged_stacked_and_transformed_tensors_arrive(save_folder, shards):
    saved, module = tensors(), on_meta()
    fill(module, open_source(save_folder(saved, shards=shards)), NAMES)
    assert torch.equal(module.embed.weight, saved["model.embed_tokens.weight"])
    assert torch.equal(module.head.weight, saved["lm_head.weight"])
    for i, block in enumerate(module.blocks):
        layer = f"model.layers.{i}."
        assert torch.equal(block.norm.weight, saved[layer + "input_layernorm.weight"])
        assert torch.equal(block.norm.bias, saved[layer + "input_layernorm.bias"])
        for leaf in ("weight", "bias"):
            parts = [saved[f"{layer}self_attn.{x}_proj.{leaf}"] for x in "qkv"]
            assert torch.equal(getattr(block.qkv, leaf), torch.cat(parts))
        assert torch.equal(block.mixer.A, -saved[layer + "mixer.A_log"].exp())
        assert torch.equal(block.mixer.D, saved[layer + "mixer.D"])
        for e in range(EXPERTS):
            gate, up, down = (saved[f"{layer}experts.{e}.{x}.weight"] for x in ("gate", "up", "down"))
            assert torch.equal(block.experts.gate_up[e], torch.cat([gate, -up]))
            assert torch.equal(block.experts.down[e], down)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_dtype_none_is_the_configurations(save_folder):
    module = on_meta()
    fill(module, open_source(save_folder(tensors(torch.bfloat16), {"dtype": "bfloat16"})), NAMES)
    assert module.embed.weight.dtype == torch.bfloat16


def test_keep_float32_and_buffers_hold_whatever_the_dtype(save_folder):
    saved, module = tensors(), on_meta()
    fill(module, open_source(save_folder(saved)), NAMES, dtype=torch.float16)
    block = module.blocks[1]
    assert block.mixer.D.dtype == block.qkv.weight.dtype == torch.float16
    assert block.mixer.A.dtype == torch.float32
    assert torch.equal(block.mixer.A, -saved["model.layers.1.mixer.A_log"].exp())
    assert block.correction.dtype == torch.float64
    assert torch.equal(block.correction, saved["model.layers.1.correction"].double())


@pytest.mark.parametrize("held", [("embed",), ("embed", "head"), ("head",)])
def test_tied_parameters_stay_tied_whichever_name_the_checkpoint_holds(save_folder, held):
    saved, module = tensors(), on_meta(tied=True)
    both = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    saved[both["head"]] = saved[both["embed"]].clone()
    for key, name in both.items():
        if key not in held:
            del saved[name]
    fill(module, open_source(save_folder(saved)), NAMES)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, saved[both[held[0]]])


def test_tied_parameters_that_the_checkpoint_holds_twice_with_other_values_come_apart(save_folder):
    saved, module = tensors(), on_meta(tied=True)
    fill(module, open_source(save_folder(saved)), NAMES)
    assert torch.equal(module.head.weight, saved["lm_head.weight"])
    assert torch.equal(module.embed.weight, saved["model.embed_tokens.weight"])


def test_reset_buffers_makes_the_buffers_that_are_not_stored(save_folder):
    module = on_meta()
    assert module.blocks[0].rotary.frequencies.is_meta
    fill(module, open_source(save_folder(tensors())), NAMES)
    assert module.blocks[0].rotary.frequencies.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_a_buffer_that_is_not_in_the_checkpoint_is_left_as_it_is(save_folder):
    saved = {name: tensor for name, tensor in tensors().items() if "correction" not in name}
    module = Model()
    fill(module, open_source(save_folder(saved)), NAMES)
    assert module.blocks[0].correction.tolist() == [0.0] * EXPERTS


def test_a_buffer_that_nothing_makes_is_named(save_folder):
    saved = {name: tensor for name, tensor in tensors().items() if "correction" not in name}
    with pytest.raises(CheckpointError, match=r"blocks\.0\.correction has no values.*Block\.reset_buffers"):
        fill(on_meta(), open_source(save_folder(saved)), NAMES)


def test_left_over_tensors_are_accepted_when_ignored(save_folder):
    saved = tensors() | {"model.layers.0.rotary.inv_freq": torch.ones(2), "vision.x.y": torch.ones(1)}
    source = open_source(save_folder(saved))
    with pytest.raises(CheckpointError, match=r"2 unexpected: model\.layers\.0\.rotary\.inv_freq, vision\.x\.y"):
        fill(on_meta(), source, NAMES)
    fill(on_meta(), source, NAMES, ignore=("model.layers.{i}.rotary.inv_freq", "vision.*"))


def test_one_error_names_all_that_is_missing_left_over_and_misshapen(save_folder):
    saved = tensors() | {"extra": torch.ones(1)}
    del saved["model.layers.1.self_attn.k_proj.bias"]
    saved["lm_head.weight"] = torch.ones(VOCAB, WIDTH + 1)
    module = on_meta()
    with pytest.raises(CheckpointError) as caught:
        fill(module, open_source(save_folder(saved)), NAMES)
    text = str(caught.value)
    assert "does not fit Model" in text
    assert "1 missing: model.layers.1.self_attn.k_proj.bias" in text
    assert "1 unexpected: extra" in text
    assert f"head.weight: found lm_head.weight [{VOCAB}, {WIDTH + 1}], expected [{VOCAB}, {WIDTH}]" in text
    assert all(parameter.is_meta for parameter in module.parameters()), "nothing was filled"


def test_a_long_list_is_cut_with_a_count(save_folder):
    extra = {f"extra.{i:02}": torch.ones(1) for i in range(11)}
    with pytest.raises(CheckpointError, match=r"11 unexpected: extra\.00, .*extra\.07, and 3 more"):
        fill(on_meta(), open_source(save_folder(tensors() | extra)), NAMES)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (
            "self_attn.k_proj.weight",
            (3, WIDTH),
            r"q_proj\.weight \[4, 4\] \+ .*k_proj\.weight \[3, 4\] \+ .*expected",
        ),
        ("self_attn.k_proj.weight", (2, 5), r"k_proj\.weight \[2, 5\] \+ .*expected \[8, 4\]"),
        (
            "experts.1.down.weight",
            (WIDTH, 2),
            r"experts\.1\.down\.weight \[4, 2\], expected \[4, 3\] for each entry",
        ),
        ("mixer.A_log", (WIDTH, 1), r"mixer\.A_log \[4, 1\], expected \[4\]"),
    ],
)
def test_wrong_shapes_in_merged_stacked_and_transformed_tensors_are_named(save_folder, name, shape, match):
    saved = tensors() | {f"model.layers.0.{name}": torch.ones(shape)}
    with pytest.raises(CheckpointError, match=match):
        fill(on_meta(), open_source(save_folder(saved)), NAMES)


def test_a_transform_that_cannot_take_its_tensor_is_named(save_folder):
    names = NAMES | {"blocks.{i}.mixer.D": From("model.layers.{i}.mixer.D", lambda t: t.view(3, 3)[0])}
    with pytest.raises(CheckpointError, match=r"mixer\.D \[4\], which cannot be transformed"):
        fill(on_meta(), open_source(save_folder(tensors())), names)


def test_a_parameter_without_a_name_is_missing(save_folder):
    names = {key: value for key, value in NAMES.items() if key != "head"}
    with pytest.raises(CheckpointError, match=r"1 missing: head\.weight \(no checkpoint name is given for it\)"):
        fill(on_meta(), open_source(save_folder(tensors())), names)


def test_more_experts_than_the_model_has_are_unexpected(save_folder):
    saved = tensors() | {f"model.layers.0.experts.{EXPERTS}.gate.weight": torch.ones(3, WIDTH)}
    with pytest.raises(CheckpointError, match=rf"1 unexpected: model\.layers\.0\.experts\.{EXPERTS}\.gate\.weight"):
        fill(on_meta(), open_source(save_folder(saved)), NAMES)


def test_an_exact_path_wins_over_a_prefix_and_a_longer_prefix_over_a_shorter():
    names = {"a": "short", "a.{i}.b": "long", "a.{i}.b.weight": "exact"}
    sources = {path: find_recipes(names, path, (1,))[0].sources for path in ("a.x", "a.3.b.bias", "a.3.b.weight")}
    assert sources == {"a.x": ["short.x"], "a.3.b.bias": ["long.bias"], "a.3.b.weight": ["exact"]}
    assert find_recipes(names, "ab.weight", (1,)) == []


def test_at_most_one_tensor_of_the_checkpoint_is_alive_at_a_time(save_folder, monkeypatch):
    source = open_source(save_folder(tensors()))
    read, alive, reads = source.read, [], 0

    def counting(name: str) -> torch.Tensor:
        nonlocal reads
        assert not [ref for ref in alive if ref() is not None], f"an earlier tensor outlives the reading of {name}"
        tensor = read(name)
        alive.append(weakref.ref(tensor))
        reads += 1
        return tensor

    monkeypatch.setattr(source, "read", counting)
    fill(on_meta(), source, NAMES)
    assert reads == len(source.names), "each tensor is read once"


def test_each_parameter_is_allocated_once(save_folder, monkeypatch):
    source = open_source(save_folder(tensors()))
    module, empty, allocated = on_meta(), torch.empty, []

    def counting(*args, **kwargs):
        made = empty(*args, **kwargs)
        if not made.is_meta:
            allocated.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", counting)
    fill(module, source, NAMES)
    stored = module.state_dict().values()
    assert sorted(allocated) == sorted(tensor.nbytes for tensor in stored)


@pytest.mark.parametrize(("terminal", "wait", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_the_progress_bar_is_for_terminals_and_long_loads(monkeypatch, terminal, wait, shown):
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress_module, "SHOW_AFTER", wait)
    with Bar("loading", 100) as bar:
        bar.advance(50)
        assert bar.shown == shown
    with Bar("loading", 100, wanted=False) as bar:
        bar.advance(50)
        assert not bar.shown
