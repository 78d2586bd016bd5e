"""A cache to save, and a way to go on from it that depends on everything a cache remembers.

Another process imports this to go on from a file: nothing slow to import belongs here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from lamina import Cache, load_cache
from tests.laws.toys import KINDS, VOCAB, toy

SLACK = 3


def go_on(cache: Cache) -> Tensor:
    """Takes every row back as far as the slack allows, then a pass of several tokens and one of one."""
    assert cache.model is not None
    cache.rewind([min(SLACK, back) for back in cache.rewindable.tolist()])
    ids = torch.arange(4 * cache.rows).reshape(cache.rows, 4) % VOCAB
    counts = [4, 0, 2][: cache.rows]
    first, second = cache.model(ids, cache=cache, counts=counts), cache.model(ids[:, :1], cache=cache)
    assert first is not None and second is not None
    padding = torch.arange(4) >= torch.tensor(counts)[:, None]
    return torch.cat([first.masked_fill(padding[..., None], 0), second], dim=1)


def main(folder: Path) -> None:
    """Goes on from each file of a folder, named by the number of its kind, and writes the logits to `found`."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    files = list(folder.iterdir())
    found = {file.name: go_on(load_cache(file, toy(KINDS[int(file.name.split("-")[0])]))) for file in files}
    save_file(found, folder / "found")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
