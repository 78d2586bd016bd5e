"""Rehearsals: passes on the meta device, which say how much memory a real pass takes, and which ways it goes."""
