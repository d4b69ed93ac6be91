"""Durability: consistent cuts become verified snapshots in object storage, and come back from there."""
