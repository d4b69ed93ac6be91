"""How ranks find each other."""

import os
import re
import socket
import time
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError, PeerLostError
from dlrm_api.names import ANY_ADDRESS
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_testing.trainer.gangs import gang_context, run_ranks
from dlrm_trainer.distributed import rendezvous
from dlrm_trainer.distributed.failures import GangStore


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

    from dlrm_trainer.distributed.rendezvous import RankGroup

    gang = RankGroup(rank, world_size, LOOPBACK, port, LOOPBACK)
    gang.meet(60.0, 60.0, lambda: None)
    sum_of_ranks(gang.collectives)
    gang.leave("")
    gang.close()
    groups.send(dist.is_initialized())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_that_end_well_leave_no_group_behind(world_size: int) -> None:
    context, port = gang_context(), free_port()
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


SECRET = "5ec2e7" * 8


def meet(rank: int, port: int, secret: str, wait_s: float, told: Connection) -> None:
    from dlrm_api.errors import PeerLostError
    from dlrm_trainer.distributed.rendezvous import RankGroup

    gang = RankGroup(rank, 2, LOOPBACK, port, LOOPBACK, secret)
    try:
        gang.meet(wait_s, 60.0, lambda: None)
    except PeerLostError as error:
        told.send(str(error))
        os._exit(error.exit_code)
    told.send("met")
    for _ in range(60):  # longer than a roll call takes to end ranks, but for EXIT_TIMEOUT_S
        sum_of_ranks(gang.collectives)
        time.sleep(0.05)
    told.send(sum_of_ranks(gang.collectives))
    gang.leave("")
    gang.close()


def start_rank(rank: int, port: int, secret: str, wait_s: float = 60.0) -> tuple[ForkServerProcess, Connection]:
    context = gang_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=meet, args=(rank, port, secret, wait_s, sender))
    process.start()
    sender.close()
    return process, receiver


def stranger(port: int) -> Any:
    """Somebody who reaches the store's port, as anything in a pod's network can."""
    from torch._C._distributed_c10d import TCPStore

    while True:
        try:
            return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=5))
        except RuntimeError:
            time.sleep(0.1)


@pytest.mark.slow
def test_a_stranger_at_the_store_is_taken_for_no_rank_and_ends_no_gang() -> None:
    port = free_port()
    first, first_told = start_rank(0, port, SECRET)
    store = stranger(port)
    for name, secret in product(("here/0", "here/1"), ("", "another")):
        GangStore(store, secret).set(name, "1")
    store.set("here/1", "1")
    waiting = not first_told.poll(2.0)
    second, second_told = start_rank(1, port, SECRET)
    met = first_told.recv(), second_told.recv()
    for name, secret in product(("verdict", "alarm"), ("", "another")):
        GangStore(store, secret).set(name, "rank 1 died or fell silent")
        store.set(name, "rank 1 died or fell silent")
    for key in store.list_keys():
        store.set(key, "rank 1 died or fell silent")
    sums = first_told.recv(), second_told.recv()
    for rank in (first, second):
        rank.join(60)

    assert waiting
    assert met == ("met", "met")
    assert sums == (1.0, 1.0)
    assert [first.exitcode, second.exitcode] == [0, 0]


@pytest.mark.slow
def test_a_rank_without_the_secret_of_the_others_is_named() -> None:
    port = free_port()
    second, _ = start_rank(1, port, "")
    first, first_told = start_rank(0, port, SECRET, wait_s=4.0)
    said = first_told.recv()
    for rank in (first, second):
        rank.join(60)

    assert said.startswith("rank 1 came without the attempt")


STORE_TIMEOUT_S = 2


def begin_late(rank: int, world_size: int, port: int, sums: Connection) -> None:
    import torch

    from dlrm_testing.trainer.nccl import meeting_as_nccl_does
    from dlrm_testing.trainer.pretended_gpu import PRETENDED
    from dlrm_trainer.distributed import rendezvous

    rendezvous.STORE_TIMEOUT_S = STORE_TIMEOUT_S
    rendezvous.backends = lambda _: "cpu:gloo"
    gang = rendezvous.RankGroup(rank, world_size, LOOPBACK, port, LOOPBACK)
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
def test_ranks_on_gpus_wait_for_a_slow_rank_0_also_at_their_first_step() -> None:
    context, port = gang_context(), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=begin_late, args=(rank, 2, port, sender)) for rank, (_, sender) in enumerate(pipes)]

    for rank, (_, sender) in zip(ranks, pipes, strict=True):
        rank.start()
        sender.close()
    found = [receiver.recv() for receiver, _ in pipes]
    for rank in ranks:
        rank.join(60)

    assert found == [1.0, 1.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_says_for_whom_since_when_and_for_how_long(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "REPORT_AFTER_S", 0.3)
    said: list[str] = []
    gang = rendezvous.RankGroup(rank, 2, "nobody.invalid" if rank else LOOPBACK, free_port(), LOOPBACK)

    with pytest.raises(PeerLostError):
        gang.meet(2.0, 60.0, lambda: None, waiting=said.append)

    whom = "rank 0 at nobody.invalid:" if rank else "rank 1 "
    [report] = said
    assert report.startswith(f"waiting for {whom}")
    assert re.search(r"since \d\d:\d\d:\d\d UTC, for at most 2 s: \S", report)


def test_an_interface_that_is_not_there_is_a_setting_to_correct() -> None:
    with pytest.raises(
        InvalidSpecError, match=r"GLOO_SOCKET_IFNAME: network interface not found: nope0; use one of .*lo"
    ):
        rendezvous.check_interfaces({"GLOO_SOCKET_IFNAME": "lo,nope0"})
    rendezvous.check_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    rendezvous.check_interfaces({})
