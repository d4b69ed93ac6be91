"""Make cuts of a gang while it trains, hand them to the checkpointer, and restore snapshots."""
