"""llama.cpp in a process of its own, asked line by line: `PYTHON llama_cpp_child.py FILE.gguf THREADS TOKENS`

It runs in the environment that has llama-cpp-python and imports nothing of Lamina. Every line of its input is a JSON
list, and every line of its output the answer:

    ["open", context]     reads a prompt of `context` tokens; -> seconds
    ["decode", steps]     reads a token and chooses the best next one, `steps` times from that context on; -> seconds
    ["prefill", tokens]   reads a prompt into an empty cache up to the logits after its last token; -> seconds
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

BATCH = 512  # tokens of one pass, which is also the default of llama.cpp


class Session:
    def __init__(self, file: str, threads: int, tokens: int) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self.api: Any = llama_cpp
        self.llama = self.api.Llama(
            file, n_ctx=tokens, n_batch=BATCH, n_ubatch=BATCH, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self.vocab = self.llama.n_vocab()
        self.context = 0

    def read(self, ids: list[int]) -> int:
        """Reads tokens after those of the cache; -> the best next token"""
        import numpy

        api, context = self.api, self.llama.ctx
        for start in range(0, len(ids), BATCH):
            piece = ids[start : start + BATCH]
            given = (api.llama_token * len(piece))(*piece)
            if api.llama_decode(context, api.llama_batch_get_one(given, len(piece))):
                raise RuntimeError("llama_decode failed")
        logits = numpy.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), shape=(self.vocab,))
        return int(logits.argmax())

    def keep(self, tokens: int) -> None:
        """Drops all but the first tokens from the cache."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.llama.ctx), -1, tokens, -1)

    def open(self, context: int) -> None:
        self.prefill(context)
        self.context = context

    def decode(self, steps: int) -> None:
        self.keep(self.context)
        token = 5
        for _ in range(steps):
            token = self.read([token])

    def prefill(self, tokens: int) -> None:
        self.keep(0)
        self.context = 0
        draw = random.Random(0)
        self.read([draw.randrange(self.vocab) for _ in range(tokens)])


def main() -> None:
    session = Session(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"version": session.api.__version__}), flush=True)
    for line in sys.stdin:
        what, count = json.loads(line)
        started = time.perf_counter()
        getattr(session, what)(count)
        print(json.dumps(time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
