"""Measurements: programs that run our code and the peer on the same data in the same run, and print JSON lines."""

from dlrm_trainer.settings import spin_briefly

spin_briefly()  # as the trainer does before it loads torch; for both sides
