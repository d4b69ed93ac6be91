"""Doubles for the tests of charts."""
