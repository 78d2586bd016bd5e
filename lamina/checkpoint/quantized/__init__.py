"""Folders whose config.json says how their weights are quantized: AWQ, GPTQ, compressed-tensors, FP8, MXFP4"""

from lamina.checkpoint.quantized.view import METHODS, QuantizedCheckpoint, method_of, with_weights

__all__ = ["METHODS", "QuantizedCheckpoint", "method_of", "with_weights"]
