"""Columns of what is counted of each table of a stack, for the loops that count and for those who read."""

from __future__ import annotations

LOOKUPS, ACCESSES, HITS, CREATED, EVICTED, SCRATCH, COUNTS = range(7)
"""Lookups; distinct rows of batches; those found in a slot; rows made; rows that left a slot; rows in extra slots."""
