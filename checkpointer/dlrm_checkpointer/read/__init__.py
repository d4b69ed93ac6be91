"""Read snapshots: restore, verify, compare and export them."""
