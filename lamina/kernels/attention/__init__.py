"""Decode attention, and what runs around it."""
