"""The settings of `generate`: what each may be, and what contradicts what."""
