"""Checks a model of transformers: its cached, padded and continued passes against its own uncached pass.

`lamina.verify` comes here when it is given a transformers model. Nothing here imports transformers before such a model
is there.
"""

from lamina.checking.transformers.verify import is_transformers_model, verify_transformers

__all__ = ["is_transformers_model", "verify_transformers"]
