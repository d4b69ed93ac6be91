"""Doubles for the tests of trainer."""
