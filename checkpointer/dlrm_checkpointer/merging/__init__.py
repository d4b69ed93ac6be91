"""A cut's rows with those of older snapshots: of each row the newest, in ascending order."""
