"""How near decoding comes to the limit of memory: what must move, what was measured, and peers beside it.

shapes.py        configurations of real models, to be filled with random numbers
random_model.py  builds one on its device
bytes.py         what a decode step has to read and write
flops.py         what a prefill has to compute
measure.py       bandwidths, matrix rate, timing, memory
context.py       a cache of any length without a prefill
decode.py        the decode steps that are timed
subjects.py      what is measured: Lamina, and its peers from peers.py
first_token.py   from the start of a process to its first token
run.py           all of it, in a bounded time
report.py        table, JSON, Markdown; plot.py: the picture
"""

from lamina.bench.random_model import random_model
from lamina.bench.runner import Settings, run
from lamina.checkpoint.shapes import SHAPES, Shape, find_shape
from lamina.planning.bytes import decode_bytes

__all__ = ["SHAPES", "Settings", "Shape", "decode_bytes", "find_shape", "random_model", "run"]
