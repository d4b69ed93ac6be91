"""Deltas for inference caches: making them, and a reference consumer."""
