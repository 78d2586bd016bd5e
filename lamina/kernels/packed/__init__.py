"""Matrix products that read packed weights: int8, int4, fp8 e4m3 and MXFP4, for decoding and for prompts."""
