"""Real ranks on loopback: how soon those of several nodes meet, their connections, and the time of an exchange."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch

from benchmarks.gang import LOOPBACK, PATIENCE_S
from benchmarks.measure import Result
from dlrm_kernels.bags import place_segments
from dlrm_trainer.distributed.rendezvous import RankGroup

MAX_MEETING_S = 30.0
NODES, PER_NODE = 4, 8
TCP_ESTABLISHED = "01"
ELEMENTS = 16, 1_024, 16_384
"""Of four bytes, to each rank."""
REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Hold what one rank saw."""

    seconds: float
    """Time until it had met all others, from when all had started."""
    sockets: int
    """Connections to other ranks, those to rank 0's store left out."""
    exchange_ms: dict[int, float]
    """Median time of an all-to-all, by elements to each rank."""


def meet(nodes: int, per_node: int, elements: tuple[int, ...] = ()) -> list[Seen]:
    """Start ranks, let them meet and exchange, and return what each saw.

    Args:
        nodes: number of nodes.
        per_node: ranks of each.
        elements: sizes of the messages that are timed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    together = context.Barrier(nodes * per_node)
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
    pipes, processes = [], []
    for rank in range(nodes * per_node):
        pipe, theirs = context.Pipe(duplex=False)
        arguments = (rank, nodes * per_node, per_node, port, elements, together, theirs)
        processes.append(context.Process(target=_rank, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(pipe)
    try:
        seen = [pipe.recv() for pipe in pipes]
    finally:
        for process in processes:
            process.join(PATIENCE_S)
            process.kill()
    return seen


def meeting(_quick: bool) -> Iterator[Result]:
    """Let 32 ranks on four nodes meet."""
    setting = {"nodes": NODES, "ranks_per_node": PER_NODE}
    seen = meet(NODES, PER_NODE)
    seconds = max(each.seconds for each in seen)
    yield Result(metric="seconds_to_meet", value=seconds, limit=MAX_MEETING_S, setting=setting)
    sockets = max(each.sockets for each in seen)
    yield Result(metric="sockets_per_rank", value=sockets, limit=2 * (NODES + PER_NODE), setting=setting)


def exchange(quick: bool) -> Iterator[Result]:
    """Time all-to-alls of ranks in two levels, and in one: as if each were on a node of its own."""
    nodes, per_node = (2, 4) if quick else (NODES, PER_NODE)
    one = meet(nodes * per_node, 1, ELEMENTS)[0].exchange_ms
    two = meet(nodes, per_node, ELEMENTS)[0].exchange_ms
    for elements in ELEMENTS:
        setting = {"nodes": nodes, "ranks_per_node": per_node, "bytes_to_each": 4 * elements}
        measured = {"one_level_ms": one[elements]}
        yield Result(metric="exchange_ms", value=two[elements], setting=setting, measured=measured)


def _rank(
    rank: int, ranks: int, per_node: int, port: int, elements: tuple[int, ...], together: Barrier, seen: Connection
) -> None:
    torch.set_num_threads(1)
    one = np.ones(1, np.int64)
    # The first call of a compiled function loads a compiler.
    place_segments(one.view(np.uint8), one, one, np.empty(2, np.uint8), one)
    together.wait()
    start = time.monotonic()
    gang = RankGroup(rank, ranks, LOOPBACK, port, LOOPBACK, per_node=per_node)
    gang.meet(PATIENCE_S, PATIENCE_S, lambda: None)
    seconds, times = time.monotonic() - start, {}
    for size in elements:
        message, sizes, taken = torch.ones(ranks * size), [size] * ranks, []
        for _ in range(REPEATS):
            gang.collectives.barrier()
            start = time.monotonic()
            gang.collectives.all_to_all("pooled", message, sizes, sizes)
            taken.append(1e3 * (time.monotonic() - start))
        times[size] = statistics.median(taken)
    gang.id_collectives.connect()
    gang.collectives.barrier()
    seen.send(Seen(seconds=seconds, sockets=_sockets(port), exchange_ms=times))
    gang.leave("")
    gang.collectives.barrier()
    os._exit(0)


def _sockets(store_port: int) -> int:
    own = set()
    for each in Path("/proc/self/fd").iterdir():
        # The one that reads the folder is gone.
        with contextlib.suppress(FileNotFoundError):
            own.add(str(each.readlink()))
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()]
    ports = [
        {int(address.rpartition(":")[2], 16) for address in line[1:3]}
        for line in lines
        if line[3] == TCP_ESTABLISHED and f"socket:[{line[9]}]" in own
    ]
    return sum(store_port not in each for each in ports)
