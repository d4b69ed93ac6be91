"""What a run tells: times, counters, tiers beside their plan, stacks, files of steps."""
