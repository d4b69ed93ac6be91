"""A side in processes of its own, one a rank, that meet over gloo on loopback."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import socket
import stat
import struct
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.shapes import Shape

LOOPBACK = "127.0.0.1"
TCP_INFO_BYTES, BYTES_SENT_AT = 256, 200
"""Of Linux' struct tcp_info."""
PATIENCE_S = 60.0


class GangError(RuntimeError):
    """Report that a rank of a side failed."""


class Gang:
    """Run the ranks of one side.

    Args:
        make: called in each process as ``make(rank, ranks, port)``, which must be picklable.
        shape: of the model.
        ranks: processes.
        threads: of each.

    Raises:
        GangError: a rank could not start.
    """

    def __init__(self, make: Callable[..., Any], shape: Shape, ranks: int, threads: int) -> None:
        context, port = multiprocessing.get_context("spawn"), _free_port()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        before = dict(os.environ)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        try:
            for rank in range(ranks):
                pipe, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make, shape, rank, ranks, port), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(pipe)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._answers()

    def draw(self, first: int, stop: int) -> None:
        """Have every rank draw its slices of batches [first, stop)."""
        self._ask("draw", first, stop)

    def run(self) -> float:
        """Train on what was drawn: seconds of the slowest rank."""
        return float(max(self._ask("run")))

    def losses(self) -> list[float]:
        """Train on what was drawn: the loss of each batch."""
        return [sum(shares) for shares in zip(*self._ask("losses"), strict=True)]

    def bytes_sent(self) -> int:
        """Over TCP by all ranks, since their start."""
        return int(sum(self._ask("bytes")))

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(PATIENCE_S)
            process.kill()

    def _ask(self, *question: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return self._answers()

    def _answers(self) -> list[Any]:
        try:
            answers = [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise GangError("a rank ended: its words are above") from None
        return answers


def _serve(pipe: Connection, make: Callable[..., Any], shape: Shape, rank: int, ranks: int, port: int) -> None:
    """Run the child process: answer until the parent is gone."""
    ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
    import torch

    from benchmarks.shapes import Batches, popularity_of, slice_of

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        side = make(shape, rank, ranks, port)
        batches = Batches(shape, popularity_of("zipf-1.05", shape.rows, Path()))
        drawn: list[Any] = []
        pipe.send(None)
        while True:
            what, *arguments = pipe.recv()
            answer: Any = None
            if what == "draw":
                drawn = [slice_of(batch, rank, ranks) for batch in batches.draw(*arguments)]
            elif what == "bytes":
                answer = _bytes_sent()
            else:
                answer = getattr(side, what)(drawn)
            pipe.send(answer)
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _bytes_sent() -> int:
    """Over all TCP connections of this process."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what the scan itself has open is gone
            if not stat.S_ISSOCK(Path(entry.path).stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    body = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                    total += struct.unpack_from("=Q", body, BYTES_SENT_AT)[0]
    return total


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
