"""Products with weight matrices for few tokens, experts included."""
