"""Checks of prompts on a GPU as a user sees them: their memory, and the chunks that are chosen by it."""
