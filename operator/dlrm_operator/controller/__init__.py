"""The loop: who leads, which jobs want a turn, what a turn sees and does."""
