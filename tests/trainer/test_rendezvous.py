"""How ranks find each other."""

import multiprocessing
import socket
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
