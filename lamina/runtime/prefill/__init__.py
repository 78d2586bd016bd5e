"""Plain passes of many tokens on a GPU, which launch kernels one by one; short prompts are captured: `prompts`.

attention.py        ways to attend that never materialize a query × key mask
masked.py           ways to attend where positions do not decide: a mask as bits, or queries in turns
selected.py         an indexer's selection as lists, and attention over it
backend.py          the memory calls
packed_backend.py   the memory calls of packed rows
"""

from lamina.runtime.prefill import attention as attention  # offers its backends to `lamina.attention`
from lamina.runtime.prefill import masked as masked  # as this does
