"""Doubles for the tests of checkpointer."""
