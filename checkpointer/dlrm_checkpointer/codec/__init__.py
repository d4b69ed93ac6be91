"""Rows as values, as codes and as bytes: pure functions and compiled loops."""
