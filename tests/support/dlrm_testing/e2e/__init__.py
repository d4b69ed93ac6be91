"""Doubles for the tests of e2e."""
