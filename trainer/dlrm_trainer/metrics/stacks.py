"""Dump the stacks of all threads of a pod's ranks, even if a rank's main thread hangs or keeps the GIL."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence

import numpy as np

SIGNAL = signal.SIGUSR1
"""Makes a rank write its stacks from the signal handler if its thread does not answer."""
ANSWER_S = 1.0
QUIET_S = 0.02
"""A dump that has not grown for this long is complete."""
MAX_DUMP_BYTES = 65_536
"""Largest dump of one rank."""


class RankStacks:
    """Share files and pipes between the ranks of a pod. Create it before they are forked.

    Args:
        ranks: of the pod.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._files = [tempfile.TemporaryFile() for _ in ranks]  # noqa: SIM115  closed with the process
        self._pipes = [os.pipe() for _ in ranks]
        self._pids = np.frombuffer(mmap.mmap(-1, 8 * len(ranks)), np.int64)
        self._lock = threading.Lock()

    def answer(self, rank: int) -> None:
        """Let this process answer for ``rank`` from now on."""
        place = self._ranks.index(rank)
        file, requests = self._files[place].fileno(), self._pipes[place][0]
        faulthandler.register(SIGNAL, file=file, all_threads=True)

        def listen() -> None:
            while os.read(requests, 1):
                faulthandler.dump_traceback(file=file, all_threads=True)

        threading.Thread(target=listen, name="dlrm-stacks", daemon=True).start()
        self._pids[place] = os.getpid()

    def dump(self) -> bytes:
        """Return the stacks of all ranks of the pod, each under its number, within a few seconds."""
        with self._lock:
            places = range(len(self._ranks))
            for place in places:
                self._clear(place)
                os.write(self._pipes[place][1], b"?")
            self._await(places)
            silent = [place for place in places if not self._size(place)]
            for place in silent:
                self._signal(place)
            self._await(silent)
            return b"".join(self._said(place) for place in places)

    def _clear(self, place: int) -> None:
        file = self._files[place].fileno()
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)

    def _signal(self, place: int) -> None:
        if self._pids[place]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._pids[place]), SIGNAL)

    def _await(self, places: Sequence[int]) -> None:
        """Wait until all dumps are complete or the time is over."""
        deadline, before = time.monotonic() + ANSWER_S, [0]
        while time.monotonic() < deadline:
            sizes = [self._size(place) for place in places]
            if all(sizes) and sizes == before:
                return
            before = sizes
            time.sleep(QUIET_S)

    def _size(self, place: int) -> int:
        return os.fstat(self._files[place].fileno()).st_size

    def _said(self, place: int) -> bytes:
        text = os.pread(self._files[place].fileno(), MAX_DUMP_BYTES, 0) or b"it says nothing\n"
        return f"rank {self._ranks[place]}, process {self._pids[place]}\n".encode() + text + b"\n"
