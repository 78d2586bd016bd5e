"""Hub ids: found in the cache, downloaded, or refused with the folder that was looked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from lamina import CheckpointError, InputError, inspect, plan
from lamina.checkpoint import open_source
from lamina.checkpoint.hub import cache_root, is_hub_id, locate, needed
from lamina.checkpoint.shapes import find_shape

NAME, COMMIT = "owner/some-model.1", "0123abcd"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def put(cache: Path, commit: str = COMMIT, ref: str | None = "main", files: dict[str, str] | None = None) -> Path:
    """Write a snapshot into the cache as huggingface_hub does."""
    folder = cache / "models--owner--some-model.1"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    for name, content in (files or {}).items():
        (snapshot / name).write_text(content)
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot


def test_a_cached_snapshot_is_opened_by_branch_and_by_commit(empty_cache):
    for commit, ref in ((COMMIT, "main"), ("ffff", "refs/pr/1")):
        save_file({"a": torch.ones(1)}, put(empty_cache, commit, ref) / "model.safetensors")
    assert open_source(NAME).path.name == COMMIT
    assert open_source(NAME, revision=COMMIT).path.name == COMMIT
    assert open_source(NAME, revision="refs/pr/1").path.name == "ffff"
    assert set(open_source(NAME).names) == {"a"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_variables_of_huggingface_hub_say(monkeypatch, variables, expected):
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected


def test_what_exists_locally_comes_before_the_cache(empty_cache, tmp_path):
    save_file({"a": torch.ones(1)}, put(empty_cache) / "model.safetensors")
    (tmp_path / "owner").mkdir()
    assert not is_hub_id(NAME)  # a path below a folder that exists
    assert locate(NAME) == Path(NAME)
    with pytest.raises(CheckpointError, match=r"owner/some-model\.1 does not exist; expected a folder"):
        open_source(NAME)


def test_offline_the_error_names_the_cache_and_the_way_out(empty_cache):
    message = (
        rf"owner/some-model\.1 does not exist here, .*has it not \({empty_cache}/models--owner--some-model\.1, main\)"
    )
    with pytest.raises(CheckpointError, match=message + r"; HF_HUB_OFFLINE forbids a download: unset it"):
        open_source(NAME)


def test_without_huggingface_hub_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("lamina.checkpoint.hub.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        open_source(NAME)


@pytest.mark.parametrize("files", [{}, {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "s"}})}])
def test_a_snapshot_without_all_weights_is_not_enough_except_for_a_plan(empty_cache, files):
    put(empty_cache, files=files)
    with pytest.raises(CheckpointError, match="the Hugging Face cache has it in part only"):
        open_source(NAME)
    shape = find_shape(NAME)
    assert (shape.name, shape.config["hidden_size"]) == (NAME, 8)


def test_a_download_fetches_only_what_is_needed(empty_cache, monkeypatch):
    asked = {}
    listed = ["config.json", "model.safetensors", "pytorch_model.bin", "README.md", "original/params.json"]

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        snapshot = put(empty_cache)
        save_file({"a": torch.ones(1)}, snapshot / "model.safetensors")
        return str(snapshot)

    def model_info(name, revision):
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in listed])

    hub = SimpleNamespace(
        snapshot_download=snapshot_download,
        HfApi=lambda: SimpleNamespace(model_info=model_info),
        __spec__=SimpleNamespace(name="huggingface_hub"),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert set(open_source(NAME, revision="v1").names) == {"a"}
    assert asked == {
        "name": NAME,
        "revision": "v1",
        "cache_dir": empty_cache,
        "allow_patterns": ["config.json", "model.safetensors"],
    }
    listed[:] = ["model-Q8_0.gguf"]
    with pytest.raises(CheckpointError, match=r"has no config\.json; it has GGUF files"):
        open_source(NAME, revision="v2")
    listed[:] = ["config.json", "pytorch_model-00001-of-00002.bin"]
    with pytest.raises(
        CheckpointError, match=r"has no \*\.safetensors; it has pytorch_model-00001.*: a pickle, .*pickle=True"
    ):
        open_source(NAME, revision="v2")
    listed[:] = [None]
    with pytest.raises(CheckpointError, match=r"cannot be downloaded: TypeError: .*; check the name and the network"):
        open_source(NAME, revision="v2")


@pytest.mark.parametrize(
    ("files", "pickle", "expected"),
    [
        (["model.safetensors", "model.fp16.safetensors", "consolidated.safetensors"], False, ["model.safetensors"]),
        (
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "consolidated-1.safetensors", "x.h5"],
            False,
            ["model.safetensors.index.json", "model-00001-of-00002.safetensors"],
        ),
        (["pytorch_model.bin", "tf_model.h5", "training_args.bin"], False, []),
        (["pytorch_model.bin", "tf_model.h5", "training_args.bin"], True, ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
            True,
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
        ),
        (
            ["vocab.txt", "merges.txt", "source.spm", "tokenizer.model", "chat_template.jinja", "onnx/config.json",
             "additional_chat_templates/rag.jinja", "flax_model.msgpack", "1/x.safetensors"],
            True,
            ["vocab.txt", "merges.txt", "source.spm", "tokenizer.model", "chat_template.jinja",
             "additional_chat_templates/rag.jinja"],
        ),
    ],
)  # fmt: skip
def test_needed_files(files, pickle, expected):
    assert needed(files, pickle) == expected


def test_pickles_in_the_cache_are_refused_by_name(empty_cache):
    torch.save({"a": torch.ones(1)}, put(empty_cache) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a pickle"):
        open_source(NAME)
    assert set(open_source(NAME, pickle=True).names) == {"a"}


def test_a_revision_is_for_hub_ids(tmp_path):
    with pytest.raises(InputError, match=r"revision='v1' is for Hub ids such as Qwen/Qwen3-0\.6B, and .* is none"):
        open_source(tmp_path, revision="v1")
    with pytest.raises(InputError, match="revision='' must be the name of a branch, a tag or a commit"):
        open_source(NAME, revision="")


def test_the_cache_may_hold_links_to_blobs_as_huggingface_hub_lays_it_out(empty_cache):
    snapshot, blobs = put(empty_cache), empty_cache / "models--owner--some-model.1" / "blobs"
    blobs.mkdir()
    save_file({"a": torch.ones(1)}, blobs / "f00d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    assert set(open_source(NAME).names) == {"a"}
    (blobs / "f00d").unlink()
    with pytest.raises(CheckpointError, match="the Hugging Face cache has it in part only"):
        open_source(NAME)


@pytest.mark.parametrize("file", ["consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_files_that_are_not_all_weights_are_not_enough(empty_cache, file):
    save_file({"a": torch.ones(1)}, put(empty_cache) / file)
    with pytest.raises(CheckpointError, match="the Hugging Face cache has it in part only"):
        open_source(NAME)


def test_an_old_id_without_an_owner_is_found_in_the_cache_alone(empty_cache):
    with pytest.raises(CheckpointError, match=r"gpt2 does not exist; expected a folder"):
        open_source("gpt2")
    snapshot = put(empty_cache)
    save_file({"a": torch.ones(1)}, snapshot / "model.safetensors")
    snapshot.parent.parent.rename(empty_cache / "models--gpt2")
    assert set(open_source("gpt2").names) == {"a"}
    assert find_shape("gpt2").name == "gpt2"


def test_a_repository_of_gguf_files_says_which_path_to_give(empty_cache):
    snapshot = put(empty_cache)
    (snapshot / "config.json").unlink()
    (snapshot / "m-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=r"has GGUF files and no config\.json: give the path of one, .*m-Q8_0\.gguf"
    ):
        open_source(NAME)


def test_an_address_is_answered_with_the_id():
    with pytest.raises(InputError, match=r"is an address: give the Hub id Qwen/Qwen3-0\.6B, or a folder"):
        open_source("https://hub.example/Qwen/Qwen3-0.6B/tree/main")


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_cannot_be_one_is_refused(path):
    with pytest.raises(InputError, match=r"path=.*: give a folder, a file, a Hub id, or one of smollm2"):
        open_source(path)


def test_an_inspection_asks_for_the_configuration_alone(empty_cache):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    for layers, commit, ref in ((1, COMMIT, "main"), (2, "ffff", "v1")):
        config = {"model_type": "llama", "num_hidden_layers": layers, "max_position_embeddings": 64, **sizes}
        (put(empty_cache, commit, ref) / "config.json").write_text(json.dumps(config))
    assert inspect(NAME).format == "a configuration alone" and inspect(NAME).problem is None
    assert (len(inspect(NAME).layers), inspect(NAME).name) == (1, NAME)
    assert inspect(NAME, revision="v1").parameters > inspect(NAME).parameters
    assert plan(NAME, revision="v1", length=8).weights > plan(NAME, length=8).weights
