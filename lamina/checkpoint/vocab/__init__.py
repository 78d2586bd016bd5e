"""Tokenizers from vocabulary files, for folders without tokenizer.json."""
