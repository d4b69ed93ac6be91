"""Measurements: programs that run our code and the peer on the same data in the same run, and print JSON lines."""
