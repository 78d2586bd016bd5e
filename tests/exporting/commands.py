"""What the C++ program decode.cpp prints for its commands, from eager passes."""

from __future__ import annotations

from pathlib import Path

import torch

from lamina import Cache, Model
from tests.laws.toys import WIDTH


def printed(model: Model, cache: Cache, commands: list[str]) -> list[list[int]]:
    """The ids of each `decode` command, row by row, if `commands` are run over this cache."""
    following, found = [-1] * cache.rows, []

    def feed(rows: list[list[int]]) -> None:
        ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
        logits = model(ids, cache=cache, counts=[len(row) for row in rows], logits="last")
        assert logits is not None
        for row, given in enumerate(rows):
            following[row] = int(logits[row].argmax()) if given else following[row]

    for command in commands:
        name, *words = command.split()
        if name == "features":
            counts = [int(word) for word in words[1:]]
            given = torch.frombuffer(bytearray(Path(words[0]).read_bytes()), dtype=model.dtype)
            given = given.view(cache.rows, WIDTH, -1)
            for row, n in enumerate(counts):
                cache.attach(model.encode(features=given[row : row + 1, :, :n]), rows=[row])  # type: ignore[operator]
            continue
        lists = [[] if word == "-" else [int(i) for i in word.split(",")] for word in words]
        if name == "feed":
            feed(lists)
        elif name == "encode":
            for row, ids in enumerate(lists):
                cache.attach(model.encode([ids]), rows=[row])  # type: ignore[operator]
        elif name == "rewind":
            cache.rewind([int(word) for word in words])
        elif name == "reset":
            cache.reset([int(word) for word in words] or None)
        else:
            made: list[list[int]] = [[] for _ in range(cache.rows)]
            for _ in range(int(words[0])):
                for row, token in enumerate(following):
                    made[row].append(token)
                feed([[token] for token in following])
            found += made
    return found
