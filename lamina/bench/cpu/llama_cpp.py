"""llama.cpp beside us: a process of another Python environment that has llama-cpp-python, asked line by line.

    with LlamaCpp("/path/of/venv/bin/python", "model.gguf", threads=2, tokens=4096) as theirs:
        theirs.open(64)
        theirs.decode(16)       # seconds, as that process measures them

Its process only waits while others are measured.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("llama_cpp_child.py")


class LlamaCppError(Exception):
    """Why there is nothing to compare with."""


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, python: str, file: Path, threads: int, tokens: int) -> None:
        """
        python   interpreter of an environment with llama-cpp-python
        tokens   the most that its cache will have to hold
        """
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        # -I: without the folder of the script, whose modules would hide those of the environment
        command = [python, "-I", str(CHILD), str(file), str(threads), str(tokens)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            raise LlamaCppError(f"{python} cannot be run: {error.strerror}") from error
        try:
            self.version = str(self._answer()["version"])
        except LlamaCppError:
            self.close()
            raise

    def open(self, context: int) -> None:
        self._ask("open", context)

    def decode(self, steps: int) -> float:
        return self._ask("decode", steps)

    def prefill(self, tokens: int) -> float:
        return self._ask("prefill", tokens)

    def _ask(self, what: str, count: int) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([what, count]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer tells why
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or [f"it ended with status {self._process.returncode}"]
        raise LlamaCppError(said[-1])

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
