"""The life cycle: from facts to actions and the next status. Pure: no I/O, no clock, no other process."""
