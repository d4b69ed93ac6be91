"""Doubles for the tests of operator."""
