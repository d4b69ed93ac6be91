"""Hold every loop that numba compiles, behind plain numpy signatures."""

from dlrm_kernels import cache

cache.configure()
