"""The memory calls of captured steps and passes on a GPU: Triton kernels over rows of a table.

backend.py   `KernelBackend`, and which kinds have kernels
attend.py    attention over keys and values of every kind
select.py    an indexer's selection
recall.py    token vectors, read back as a tensor
logged.py    recurrences of caches with slack
"""
