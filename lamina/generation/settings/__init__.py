"""The settings of `generate`: declarations, types for editors, checks of each value and of all together."""
