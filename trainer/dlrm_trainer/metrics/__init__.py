"""Report on a run: progress, times, counters, use of tiers, stacks, and files of steps."""
