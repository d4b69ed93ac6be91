"""Publish deltas for inference caches, and apply them in a reference consumer."""
