"""Memory in pages that many caches share."""
