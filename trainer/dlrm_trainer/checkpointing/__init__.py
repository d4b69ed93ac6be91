"""Cuts of a gang: when, how they go over while training goes on, and how snapshots come back."""
