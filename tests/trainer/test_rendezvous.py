"""How ranks find each other."""

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
from gangs import run_ranks

from dlrm_api.names import ANY_ADDRESS
from dlrm_cluster.ports import LOOPBACK, free_port


def sum_of_ranks(collectives: Any) -> float:
    import torch

    ranks = torch.tensor([float(collectives.rank)])
    collectives.start_sum(ranks).wait()
    return float(ranks[0])


@pytest.mark.slow
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_rank_0_is_found_at_an_address_of_either_family(host: str) -> None:
    assert run_ranks(3, sum_of_ranks, host=host, bind=ANY_ADDRESS) == [3.0, 3.0, 3.0]


def end_well(rank: int, world_size: int, port: int, groups: Connection) -> None:
    import torch.distributed as dist

    from dlrm_trainer.rendezvous import Gang

    gang = Gang(rank, world_size, LOOPBACK, port, LOOPBACK)
    gang.meet(60.0, 60.0, lambda: None)
    sum_of_ranks(gang.collectives)
    gang.leave("")
    gang.close()
    groups.send(dist.is_initialized())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_end_well_leave_no_group_behind(world_size: int) -> None:
    context, port = multiprocessing.get_context("forkserver"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=end_well, args=(rank, world_size, port, sender))
        for rank, (_, sender) in enumerate(pipes)
    ]

    for rank in ranks:
        rank.start()
    left = [receiver.recv() for receiver, _ in pipes]
    for rank in ranks:
        rank.join(60)

    assert left == [False] * world_size
    assert [rank.exitcode for rank in ranks] == [0] * world_size


STORE_TIMEOUT_S = 3


def begin_late(rank: int, world_size: int, port: int, sums: Connection) -> None:
    import torch
    from nccl import meeting_as_nccl_does
    from pretended_gpu import PRETENDED

    from dlrm_trainer import rendezvous

    rendezvous.STORE_TIMEOUT_S = STORE_TIMEOUT_S
    rendezvous.backends = lambda _: "cpu:gloo"
    gang = rendezvous.Gang(rank, world_size, LOOPBACK, port, LOOPBACK)
    with meeting_as_nccl_does():
        gang.meet(60.0, 60.0, lambda: None, PRETENDED)
        if rank == 0:
            time.sleep(2 * STORE_TIMEOUT_S)
        ranks = torch.full((1,), float(rank), device=PRETENDED)
        gang.collectives.start_sum(ranks).wait()
    sums.send(ranks.item())
    gang.leave("")
    gang.close()


@pytest.mark.slow
def test_ranks_on_gpus_wait_for_a_slow_rank_0_as_long_at_their_first_step_as_at_others() -> None:
    context, port = multiprocessing.get_context("forkserver"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=begin_late, args=(rank, 2, port, sender)) for rank, (_, sender) in enumerate(pipes)]

    for rank, (_, sender) in zip(ranks, pipes, strict=True):
        rank.start()
        sender.close()
    found = [receiver.recv() for receiver, _ in pipes]
    for rank in ranks:
        rank.join(60)

    assert found == [1.0, 1.0]
