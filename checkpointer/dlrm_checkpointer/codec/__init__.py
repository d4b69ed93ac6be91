"""Encode rows, row numbers and digests: pure functions around compiled loops."""
