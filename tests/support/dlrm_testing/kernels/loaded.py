"""Compile once where processes are forked: what numba then registers takes each of them a fifth of a second."""

import numba

numba.njit(lambda: 0)()
