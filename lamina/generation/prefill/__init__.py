"""Prefill: how prompts are fed: in chunks that fit into memory, watched, scored, and interruptible between chunks."""
