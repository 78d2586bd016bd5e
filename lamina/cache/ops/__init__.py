"""The operations on a cache: open and commit a pass, rewind, select, join, reorder, attach, snapshot."""
