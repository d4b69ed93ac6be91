"""Snapshots read back: restore, verification, comparison and exports."""
