"""Ranks that do nothing but collectives, in the main thread and in one that sends ids, until they lose a peer."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from dlrm_api.errors import PeerLostError
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_testing.trainer.gangs import gang_context

PAUSE_S = 0.01


def start_peers(
    world_size: int, timeout_s: float, hangs: int | None, per_node: int = 1, dies: tuple[int, str, int] | None = None
) -> list[tuple[ForkServerProcess, Connection]]:
    """Start ranks and wait until all have met; each sends its last words, an empty string first.

    Args:
        world_size: number of ranks.
        timeout_s: of collectives.
        hangs: the rank whose main thread sleeps after a few steps.
        per_node: ranks in a row that are on one node.
        dies: a rank, and torch's collective of which it makes only so many, and is killed at the next.
    """
    context, port = gang_context(), free_port()
    peers = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_peer, args=(rank, world_size, per_node, port, timeout_s, rank == hangs, dies, sender)
        )
        process.start()
        sender.close()
        peers.append((process, receiver))
    assert [pipe.recv() for _, pipe in peers] == [""] * world_size
    return peers


def _die_at(collective: str, made: int) -> None:
    """Kill this process at a call of torch's after so many."""
    import torch.distributed as dist

    call, left = getattr(dist, collective), iter(range(made))

    def make(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    setattr(dist, collective, make)


def _peer(
    rank: int,
    world_size: int,
    per_node: int,
    port: int,
    timeout_s: float,
    hangs: bool,
    dies: tuple[int, str, int] | None,
    words: Connection,
) -> None:
    import torch

    from dlrm_trainer.distributed import failures
    from dlrm_trainer.distributed.rendezvous import RankGroup

    if hangs:
        failures.EXIT_TIMEOUT_S = 1.0
    torch.set_num_threads(1)
    gang = RankGroup(rank, world_size, LOOPBACK, port, LOOPBACK, per_node=per_node)
    gang.meet(60.0, timeout_s, lambda: None)
    if dies is not None and dies[0] == rank:
        _die_at(*dies[1:])
    words.send("")
    thread = ThreadPoolExecutor(1)
    ones = [1] * world_size

    def send_ids() -> None:
        gang.id_collectives.all_to_all("ids", torch.ones(world_size), ones, ones)

    try:
        sent = thread.submit(send_ids)
        for step in range(100_000):
            if hangs and step == 20:
                time.sleep(3_600)
            sending, sent = sent, thread.submit(send_ids)
            sending.result()
            time.sleep(PAUSE_S * (1 + rank))  # ranks come to collectives at moments of their own
            arriving = gang.collectives.start_all_to_all("pooled", torch.ones(world_size), ones, ones)
            summing = gang.collectives.start_sum(torch.ones(1_000))
            arriving.wait()
            summing.wait()
    except PeerLostError as error:
        gang.leave("")
        words.send(str(error))
        os._exit(error.exit_code)
