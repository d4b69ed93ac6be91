"""Ranks among each other: collectives, number formats of what travels, meeting, and who is gone."""
