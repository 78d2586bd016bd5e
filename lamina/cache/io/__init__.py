"""Cache files."""
