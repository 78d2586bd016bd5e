"""Decoding on a CPU beside the limit of memory, transformers and llama.cpp: `lamina bench --cpu`.

table.py         the table, in one run
native_read.py   the read bandwidth of native programs
llama_cpp.py     llama.cpp in a process of another environment; llama_cpp_child.py: what runs there
report.py        the table as Markdown and JSON
"""
