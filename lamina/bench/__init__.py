"""How near decoding comes to the limit of memory: what must move, what was measured, and peers beside it.

random_model.py  a model of a known shape (checkpoint/shapes.py) with random weights, on its device
flops.py         what a prefill has to compute
measure.py       bandwidths, matrix rate, timing, memory
decode.py        the decode steps that are timed
subjects.py      what is measured: Lamina, and its peers from peers.py
first_token.py   from the start of a process to its first token
runner.py        a whole run, in a bounded time
report.py        table, JSON, Markdown; plot.py: the picture
cpu/             decoding on a CPU beside transformers and llama.cpp

The bytes that a decode step has to move, and caches of any length without a prefill, are in lamina/planning.
"""

from lamina.bench.random_model import random_model
from lamina.bench.runner import BenchSettings, run
from lamina.checkpoint.shapes import SHAPES, ModelShape, find_shape
from lamina.planning.bytes import decode_bytes

__all__ = ["SHAPES", "BenchSettings", "ModelShape", "decode_bytes", "find_shape", "random_model", "run"]
