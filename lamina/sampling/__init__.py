"""From logits to the next token: the processors that change scores, and the noise that sampling draws with."""
