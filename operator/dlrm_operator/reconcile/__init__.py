"""The decisions of the operator: pure functions from what was observed of a job to actions."""
