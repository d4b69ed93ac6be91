"""Run a program that the kernel kills as soon as its parent dies: ``tether.py <parent pid> <program> [args]``.

A launcher of its own, because the usual ``preexec_fn`` forks the whole (threaded) test process and runs
Python in the copy, which may deadlock and which Python 3.12 warns of. ``exec`` keeps the process id and
the death signal. Run as a file with ``-I -S``, so that the start costs milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Ask for the death signal, then become the program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # died before we asked: nobody would ever send the signal
        sys.exit("the parent is gone")
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
