"""Measurements: programs that run our code and the peer on the same data in the same run, and print JSON lines."""

from dlrm_trainer.settings import tune_process

tune_process()  # as a rank does before it loads torch; for both sides
