"""From the start of a process to its first token: `python -m lamina.bench.first_token REQUEST`

A fresh process imports, makes the weights and generates, with empty caches of compiled kernels, as after installing.
The parent says when it started the process; the child prints what it saw as one line of JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.bench.subjects import Contestant

PROMPT, NEW = 128, 32  # tokens


@dataclass(frozen=True)
class FirstToken:
    """Seconds since the process was started, and how fast it was from the 10th token on."""

    subject: str
    imported: float
    """When PyTorch and this library were imported."""
    ready: float
    """When the model with its weights was there."""
    first: float
    tenth: float
    tokens_per_second: float
    slowest: float
    """The longest that any token after the 10th took."""
    peak_bytes: int | None


def first_token(shape: str, dtype: str, device: str, subject: str, timeout: float) -> FirstToken:
    """Measures it in a process of its own."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        request = dict(shape=shape, dtype=dtype, device=device, subject=subject, started=time.time())
        done = subprocess.run(
            [sys.executable, "-m", "lamina.bench.first_token", json.dumps(request)],
            capture_output=True, text=True, timeout=timeout, env=os.environ | caches,
        )  # fmt: skip
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise RuntimeError(f"the process ended with {done.returncode}: {last}")
    return FirstToken(**json.loads(done.stdout.strip().splitlines()[-1]))


def make_subject(shape: str, dtype: str, device: str, subject: str) -> Contestant:
    """What `subject` names, with its weights."""
    import torch

    from lamina.checkpoint.shapes import find_shape

    config, kind, place = find_shape(shape).config, getattr(torch, dtype), torch.device(device)
    if subject == "lamina":
        from lamina.bench.random_model import random_model  # imports are part of what is timed
        from lamina.bench.subjects import Lamina

        return Lamina(random_model(config, kind, place))
    from lamina.bench.peers import Dynamic, Static, peer_model  # imports are part of what is timed

    return next(peer for peer in (Dynamic, Static) if peer.name == subject)(peer_model(config, kind, place))


def main() -> None:
    request = json.loads(sys.argv[1])
    started = request.pop("started")

    import torch

    import lamina.bench.subjects  # noqa: F401  (all that decoding needs)
    from lamina.bench.measure import peak_of_process

    imported = time.time()
    subject = make_subject(**request)
    device = torch.device(request["device"])
    ids = torch.arange(PROMPT, device=device)[None] % 50
    ready = time.time()
    known = [at - started for at in subject.stream(ids, NEW)]
    gaps = [after - before for before, after in pairwise(known[9:])]
    seen = FirstToken(
        subject.name, imported - started, ready - started, known[0], known[9], 1 / statistics.median(gaps), max(gaps),
        peak_of_process(device),
    )  # fmt: skip
    print(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
