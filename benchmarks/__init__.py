"""Measurements: programs that run our code and the peer on the same data in the same run, and print JSON lines."""

from dlrm_trainer.settings import keep_memory, spin_briefly

spin_briefly()  # both as a rank does before it loads torch; for both sides
keep_memory()
