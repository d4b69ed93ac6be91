"""Hold every loop that numba compiles, behind plain numpy signatures."""
