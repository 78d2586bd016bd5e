"""The layers of a bridge cache: their kinds and specs, and what transformers sees of them."""
