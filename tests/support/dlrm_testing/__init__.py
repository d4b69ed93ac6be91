"""Doubles, models and references that tests share."""
