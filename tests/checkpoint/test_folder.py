from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lamina import CheckpointError
from lamina.checkpoint import config_dtype, open_source

TENSORS = {
    "a.weight": torch.randn(3, 4),
    "b.weight": torch.randn(2, dtype=torch.bfloat16),
    "c.weight": torch.arange(6).view(1, 2, 3),
}


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
def test_every_tensor_is_read_as_it_was_saved(save_folder, shards):
    source = open_source(str(save_folder(TENSORS, {"model_type": "x", "dtype": "float32"}, shards)))
    assert source.config == {"model_type": "x", "dtype": "float32"}
    assert set(source.names) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert source.read(name).dtype == tensor.dtype
        assert torch.equal(source.read(name), tensor)


def test_any_safetensors_files_do_where_there_is_neither_a_model_file_nor_an_index(save_folder, tmp_path):
    save_folder({"a": torch.ones(1)}, name="first")
    save_folder({"b": torch.zeros(1)}, name="second")
    assert set(open_source(tmp_path).names) == {"a", "b"}


@pytest.mark.parametrize("other", ["consolidated", "consolidated-00001-of-00002", "adapter_model"])
def test_files_of_other_formats_are_not_read_beside_shards_without_an_index(save_folder, tmp_path, other):
    save_folder({"a": torch.ones(1)}, name="model-00001-of-00001")
    save_folder({"layers.0.wq": torch.zeros(1)}, name=other)
    assert set(open_source(tmp_path).names) == {"a"}


def test_files_named_model_come_before_others(save_folder, tmp_path):
    save_folder({"a": torch.ones(1)}, name="model.fp16")
    save_folder({"a": torch.ones(1)}, name="other")
    assert set(open_source(tmp_path).names) == {"a"}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "consolidated.safetensors",
            r"\(it holds consolidated\.safetensors: a release in Mistral's or Meta's own format",
        ),
        ("adapter_model.safetensors", r"\(it holds adapter_model\.safetensors: an adapter of another model: merge it"),
        ("tf_model.h5", r"\(it holds tf_model\.h5: weights of TensorFlow: save the model as safetensors\)"),
        ("model-Q8_0.gguf", r"\(it holds model-Q8_0\.gguf: give the path of that file\)"),
    ],
)
@pytest.mark.parametrize("config", [False, True])
def test_a_folder_of_another_format_says_what_it_holds(tmp_path, file, message, config):
    (tmp_path / file).write_bytes(b"")
    if config:
        (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, message)


def test_the_single_file_wins_over_other_files(save_folder, tmp_path):
    save_folder({"a": torch.ones(1)}, name="consolidated")
    save_folder({"b": torch.zeros(1)})
    assert set(open_source(tmp_path).names) == {"b"}


def test_tensors_live_on_the_map_and_are_not_copied(save_folder):
    source = open_source(save_folder(TENSORS))
    assert source.read("a.weight").data_ptr() == source.read("a.weight").data_ptr()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 1}, (5, 6)),
        (None, {"eos_token_id": 1}, (1,)),
        (None, {"text_config": {"eos_token_id": 3}}, (3,)),
        (None, {"encoder": {"eos_token_id": 4}, "decoder": {"eos_token_id": 5}}, (5,)),
        ({}, {"eos_token_id": None}, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(save_folder, generation, config, expected):
    path = save_folder(TENSORS, config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert open_source(path).eos_ids == expected


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"dtype": "auto", "torch_dtype": None}, torch.float32),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"torch_dtype": None, "text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ({"encoder": {"dtype": "float32"}, "decoder": {"dtype": "float16"}}, torch.float16),
    ],
)
def test_config_dtype(config, dtype):
    assert config_dtype(config) == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_without_a_dtype_in_the_configuration_it_is_that_of_the_tensors(save_folder, dtype):
    tensors = {"a": torch.arange(3), "b": torch.ones(2, dtype=torch.float8_e4m3fn), "c": torch.ones(1, dtype=dtype)}
    assert config_dtype(open_source(save_folder(tensors)).config) == dtype
    assert config_dtype(open_source(save_folder(tensors, {"dtype": "float32"})).config) == torch.float32


def test_a_dtype_that_cannot_be_computed_in_is_refused():
    with pytest.raises(CheckpointError, match=r"dtype is 'float8_e4m3fn', not one of .*float32"):
        config_dtype({"dtype": "float8_e4m3fn"})


def test_settings_for_generation_in_the_configuration_count_where_there_is_no_file_for_them(save_folder):
    path = save_folder(TENSORS, {"num_beams": 4, "top_k": None, "vocab_size": 5, "decoder": {"max_length": 9}})
    assert open_source(path).generation_config == {"num_beams": 4, "max_length": 9}
    (path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert open_source(path).generation_config == {"top_p": 0.5}


def refused(path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        open_source(path)


def test_a_path_that_does_not_exist_says_what_was_looked_for(tmp_path):
    refused(
        tmp_path / "none", r"none does not exist; expected a folder with config.json .*, a \.gguf file, or a known name"
    )


def test_a_file_that_is_no_checkpoint_says_what_was_looked_for(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    for name in ("model.safetensors", "config.json", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"")
        refused(tmp_path / name, rf"neither a folder nor a \.gguf file \(give its folder, {tmp_path}\)")
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"")
    refused(tmp_path / "m-00002-of-00002.gguf", rf"does not exist \({tmp_path} has m-00001-of-00002\.gguf\); expected")


def test_a_folder_without_config_is_refused(tmp_path):
    refused(tmp_path, r"has no config\.json, which describes the model \(it is empty\)$")
    for name in ("big", "tiny"):
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    refused(tmp_path, r"has no config\.json, .* \(it holds big\.gguf, tiny\.gguf: give the path of one of them\)")


def test_a_folder_of_checkpoint_folders_names_them(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    refused(tmp_path, r"has no config\.json, .* \(folders in it have one: give the path of mine\)$")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, r"has no model\.safetensors, no model\.safetensors\.index\.json and no \*\.safetensors$")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, r"pytorch_model\.bin: a pickle, .* save the model again as safetensors, or .*pickle=True")


@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("legacy", [False, True])
def test_pickles_are_read_where_they_are_allowed_and_there_are_no_safetensors(tmp_path, shards, legacy):
    (tmp_path / "config.json").write_text("{}")
    places = {}
    for shard in range(shards or 1):
        file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin" if shards else "pytorch_model.bin"
        part = {name: TENSORS[name] for name in sorted(TENSORS)[shard :: shards or 1]}
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=not legacy)
        places |= dict.fromkeys(part, file)
    if shards:
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    (tmp_path / "training_args.bin").write_bytes(b"never read")
    refused(tmp_path, "pickle=True")
    source = open_source(tmp_path, pickle=True)
    assert set(source.names) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor)
    save_file({"safe": torch.ones(1)}, tmp_path / "model.safetensors")
    assert set(open_source(tmp_path, pickle=True).names) == {"safe"}


class Harmful:
    def __reduce__(self):
        return Path.mkdir, (Path("harm"),)


@pytest.mark.parametrize("content", [{"a": Harmful()}, [torch.ones(1)], {"a": 1}, None])
def test_a_pickle_with_anything_but_tensors_is_refused_and_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    if content is None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"cut")
    else:
        torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin (cannot be read as a file of|holds something else|is cut short)"
    ) as told:
        open_source(tmp_path, pickle=True)
    assert "weights_only" not in str(told.value)  # PyTorch's advice to run what the file says
    assert not (tmp_path / "harm").exists()


def test_a_configuration_that_is_not_an_object_is_refused(save_folder):
    path = save_folder(TENSORS)
    (path / "config.json").write_text("{")
    refused(path, r"config\.json is not valid JSON")
    (path / "config.json").write_text("[]")
    refused(path, r"config\.json holds a list, not an object")


def test_missing_shards_are_named_with_a_count_of_the_rest(save_folder):
    path = save_folder({f"t{i:02}": torch.ones(1) for i in range(12)}, shards=12)
    for file in sorted(path.glob("*.safetensors"))[1:]:
        file.unlink()
    message = r"lacks 11 of 12 shards: model-00002-of-00012\.safetensors, .* and 3 more; copy or download them again$"
    refused(path, message)
    (path / "model.safetensors.index.json").unlink()  # the name of the one that is there says how many there are
    refused(path, message)


def test_a_shard_that_links_to_nothing_is_missing_and_so_is_a_single_file(save_folder):
    path = save_folder(TENSORS, shards=2)
    file = path / "model-00002-of-00002.safetensors"
    file.unlink()
    file.symlink_to("../blobs/0123")
    refused(path, r"lacks 1 of 2 shards: model-00002-of-00002\.safetensors")
    for file in path.glob("*.safetensors*"):
        file.unlink()
    (path / "model.safetensors").symlink_to("../blobs/0123")
    refused(path, r"model\.safetensors is a link to \.\./blobs/0123, which does not exist; copy or download it again")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"is a pointer of Git LFS, not the file itself: run git lfs pull"):
        open_source(tmp_path, pickle=True)


@pytest.mark.parametrize("place", [5, None, ["a"]])
def test_an_index_must_name_files(save_folder, place):
    path = save_folder(TENSORS, shards=1)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": place}}))
    refused(path, r"must name a file for each tensor, and does not for a\.weight")


def test_a_tensor_that_its_shard_lacks_is_named(save_folder):
    path = save_folder(TENSORS, shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    refused(path, r"names tensors that the shards lack: ghost \(in model-00001-of-00002\.safetensors\)")


def test_an_index_may_not_lead_outside_its_folder(save_folder):
    path = save_folder(TENSORS, shards=1)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    refused(path, r"names files outside its folder: \.\./x\.safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    refused(path, r"has no weight_map")


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_file_is_refused_when_it_is_opened(save_folder, size):
    file = save_folder(TENSORS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(file.parent, rf"model\.safetensors \({file.stat().st_size} bytes\) is cut short or not a safetensors")


def test_a_tensor_in_two_files_is_refused(save_folder, tmp_path):
    save_folder({"a": torch.ones(1)}, name="first")
    save_file({"a": torch.ones(1)}, tmp_path / "second.safetensors")
    refused(tmp_path, r"second\.safetensors repeats tensors of another file in .*: a; leave one of the two$")


def test_asking_for_an_unknown_tensor_names_it(save_folder):
    source = open_source(save_folder(TENSORS))
    with pytest.raises(CheckpointError, match="has no tensor ghost"):
        source.shape("ghost")
    with pytest.raises(CheckpointError, match="has no tensor ghost"):
        source.read("ghost")
