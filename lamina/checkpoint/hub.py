"""A Hub id such as `Qwen/Qwen3-0.6B`, resolved to a folder of the local Hugging Face cache, downloaded where needed.

The cache has one folder for a repository, with a file for each branch and a folder for each commit:

    models--Qwen--Qwen3-0.6B/refs/main            the commit that main is at
    models--Qwen--Qwen3-0.6B/snapshots/COMMIT/    config.json, model.safetensors …

A complete snapshot is used without asking the network. Otherwise `huggingface_hub`, if it is installed, downloads the
files that are needed, unless HF_HUB_OFFLINE is set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from lamina.checkpoint.demo_weights import named_checkpoint
from lamina.errors import CheckpointError, InputError

PART = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(f"{PART}/{PART}")
ADDRESS = re.compile(f"https?://[^/]+/({PART}/{PART}|{PART})")
SMALL = re.compile(
    r"(?!.*\.index\.).*\.(json|txt|jinja|model|spm)|model\.safetensors\.index\.json|additional_chat_templates/.*\.jinja"
)
"""Files beside the weights: configurations, vocabularies, chat templates."""
WEIGHTS = ("model.safetensors", r"model[-.\w]*\.safetensors", r"(?!consolidated)[^/]*\.safetensors")
PICKLED = ("pytorch_model.bin", r"pytorch_model[-.\w]*\.bin")


def locate(
    path: str | os.PathLike[str], revision: str | None = None, *, pickle: bool = False, weights: bool = True
) -> Path:
    """The file or folder of a checkpoint: of a path, a known name or a Hub id. What exists locally comes first.

    revision  a branch, tag or commit of a Hub repository; None: main
    pickle    whether pytorch_model.bin may be downloaded where there are no safetensors
    weights   False: only the files beside the weights are needed

    >>> locate("/models/mine")
    PosixPath('/models/mine')
    """
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise InputError(f"revision={revision!r} must be the name of a branch, a tag or a commit")
    found = named_checkpoint(path)
    if isinstance(path, str) and (address := ADDRESS.match(path)) is not None:
        raise InputError(f"{path} is an address: give the Hub id {address[1]}, or a folder")
    if not is_hub_id(path):
        if revision is not None:
            raise InputError(f"revision={revision!r} is for Hub ids such as Qwen/Qwen3-0.6B, and {path} is none")
        return found
    name, wanted = str(path), revision or "main"
    snapshot = cached_snapshot(name, wanted)
    if snapshot is not None and (not weights or is_complete(snapshot, pickle)):
        return snapshot
    state = "in part only" if snapshot is not None else "not"
    looked = f"{name} does not exist here, and the Hugging Face cache has it {state} ({repository(name)}, {wanted})"
    if snapshot is not None and offline() and any(snapshot.glob("pytorch_model*.bin")):
        return snapshot  # pickles, which are refused by name
    if offline():
        raise CheckpointError(f"{looked}; HF_HUB_OFFLINE forbids a download: unset it, or give a folder")
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{looked}; to download it: pip install huggingface_hub, or give a folder")
    return download(name, wanted, looked, pickle, weights)


def is_hub_id(path: str | os.PathLike[str]) -> bool:
    """Whether a text is of the form owner/name and no local path. A path below an existing folder is never an id. An
    old id without an owner (gpt2) is one if the cache has it.

    >>> is_hub_id("Qwen/Qwen3-0.6B"), is_hub_id("./mine"), is_hub_id("a/b/c"), is_hub_id("a/model.gguf")
    (True, False, False, False)
    """
    if not isinstance(path, str) or path.lower().endswith((".gguf", ".json")) or os.path.exists(path):
        return False
    if re.fullmatch(PART, path) is not None:
        return repository(path).is_dir()
    return HUB_ID.fullmatch(path) is not None and not os.path.isdir(path.partition("/")[0])


def cache_root() -> Path:
    """The folder of the Hugging Face cache, by the variables that huggingface_hub reads."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if value := os.environ.get(variable):
            return Path(value).expanduser() / below
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def repository(name: str) -> Path:
    """The folder of a repository in the cache."""
    return cache_root() / f"models--{name.replace('/', '--')}"


def cached_snapshot(name: str, revision: str) -> Path | None:
    """The snapshot folder of a branch, tag or commit that is in the cache; None if there is none."""
    if ".." in PurePosixPath(revision).parts:
        return None
    folder = repository(name)
    ref = folder / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    if (snapshot / "config.json").is_file():
        return snapshot
    if files := sorted(map(str, snapshot.glob("*.gguf"))):
        raise CheckpointError(f"{name} has GGUF files and no config.json: give the path of one, such as {files[0]}")
    return None


def is_complete(snapshot: Path, pickle: bool) -> bool:
    """Whether a snapshot has weights, and all shards that an index names."""
    kinds = ["model.safetensors", *(["pytorch_model.bin"] if pickle else [])]
    for single in kinds:
        if (snapshot / single).is_file():
            return True
        if (index := snapshot / f"{single}.index.json").is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError):
                return True  # the error is named when it is opened
            return all((snapshot / shard).is_file() for shard in shards)
    from lamina.checkpoint.folder import numbered, plain_files  # which imports this module

    names = [file.name for file in plain_files(snapshot)]
    return bool(names) and all((snapshot / name).is_file() for name in (*names, *numbered(names)))


def offline() -> bool:
    variables = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().lower() in ("1", "true", "yes", "on") for value in variables)


def needed(files: Iterable[str], pickle: bool = False, weights: bool = True) -> list[str]:
    """The files of a repository that loading needs: of several forms of the weights only one, nothing of subfolders.

    >>> needed(["config.json", "model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth", "a.png"])
    ['config.json', 'model.safetensors']
    """
    files = list(files)
    small = [file for file in files if ("/" not in file or "chat_templates/" in file) and SMALL.fullmatch(file)]
    for pattern in (*WEIGHTS, *(PICKLED if pickle else ())) if weights else ():
        if chosen := [file for file in files if re.fullmatch(pattern, file)]:
            index = [file for file in files if pickle and file == "pytorch_model.bin.index.json"]
            return [*small, *chosen, *(index if chosen[0].endswith(".bin") else [])]
    return small


def download(name: str, revision: str, looked: str, pickle: bool, weights: bool) -> Path:
    """Downloads what loading needs into the cache; the snapshot folder."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        listed = [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()]
        files = needed(listed, pickle, weights)
        if "config.json" not in files:
            gguf = [file for file in listed if file.endswith(".gguf")]
            hint = "; it has GGUF files: download one of them and give its path" if gguf else ""
            raise CheckpointError(f"the Hub repository {name} ({revision}) has no config.json{hint}")
        pickled = [file for file in listed if re.fullmatch(PICKLED[1], file)]
        if weights and not pickle and pickled and not any(file.endswith(".safetensors") for file in files):
            raise CheckpointError(
                f"the Hub repository {name} ({revision}) has no *.safetensors; it has {pickled[0]}: a pickle, which "
                "can run code when it is read: give another revision, or allow it with pickle=True (--pickle)"
            )
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache_root(), allow_patterns=list(map(literal, files)))
        )
    except CheckpointError:
        raise
    except Exception as error:  # of many types: network, authorization, disk
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{looked}, and it cannot be downloaded: {type(error).__name__}: {reason}; check the name and the network, "
            "log in (hf auth login) where the repository asks for it, or give a folder"
        ) from error


def literal(name: str) -> str:
    """A file name as a pattern that matches this name only."""
    return re.sub(r"([\[*?])", r"[\1]", name)
