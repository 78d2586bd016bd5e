"""Recurrent mixers for a few tokens per row: the short convolution, the rules, and mixers in one kernel."""
