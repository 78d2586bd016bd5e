"""What the C++ program decode.cpp prints for its commands, from eager passes."""

from __future__ import annotations

from pathlib import Path

import torch

from lamina import Cache, Model


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
            given = given.view(cache.rows, *model.source_example(1, 1).shape[1:-1], -1)  # type: ignore[operator]
            for row, n in enumerate(counts):
                if n:  # otherwise it keeps the source that it has
                    cache.attach(model.encode(features=given[row : row + 1, :, :n]), rows=[row])  # type: ignore[operator]
            continue
        lists = [[] if word == "-" else [int(i) for i in word.split(",")] for word in words]
        if name == "feed":
            feed(lists)
        elif name == "encode":
            for row, ids in enumerate(lists):
                cache.attach(model.encode([ids]), rows=[row])  # type: ignore[operator]
        elif name == "rewind":
            back = [int(word) for word in words]
            cache.rewind(back)
            following = [-1 if n else token for n, token in zip(back, following, strict=True)]
        elif name == "reset":
            emptied = [int(word) for word in words] or range(cache.rows)
            cache.reset(list(emptied))
            following = [-1 if row in emptied else token for row, token in enumerate(following)]
        else:
            made: list[list[int]] = [[] for _ in range(cache.rows)]
            for _ in range(int(words[0])):
                pieces: list[list[int]] = [[] if token in (-1, *model.eos_ids) else [token] for token in following]
                made = [row + piece for row, piece in zip(made, pieces, strict=True)]
                if not any(pieces):
                    break
                feed(pieces)
            for row, token in enumerate(following):  # one that ends a row is printed and not fed
                made[row] += [token] if token in model.eos_ids and len(made[row]) < int(words[0]) else []
            found += made
    return found
