"""Plain numpy references of compiled functions."""
