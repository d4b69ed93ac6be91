"""How ranks find each other."""

import ctypes
import errno
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError, PeerLostError
from dlrm_api.names import ANY_ADDRESS, Env, ExitCode
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
        gang.meet(1.0, 60.0, lambda: None, waiting=said.append)

    whom = "rank 0 at nobody.invalid:" if rank else "rank 1 "
    [report] = said
    assert report.startswith(f"waiting for {whom}")
    assert re.search(r"since \d\d:\d\d:\d\d UTC, for at most 1 s: \S", report)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("host", "port", "field"),
    [
        ("bad host", 29_500, Env.MASTER_ADDR),
        ("a" * 64, 29_500, Env.MASTER_ADDR),
        ("pod..service", 29_500, Env.MASTER_ADDR),
        ("10.0.0.256", 29_500, Env.MASTER_ADDR),
        ("fd00::g", 29_500, Env.MASTER_ADDR),
        ("pod.service", 0, Env.MASTER_PORT),
        (LOOPBACK, 70_000, Env.MASTER_PORT),
    ],
)
def test_address_that_cannot_exist_ends_the_wait_at_once(rank: int, host: str, port: int, field: str) -> None:
    gang = rendezvous.RankGroup(rank, 2, host, port, LOOPBACK)

    with pytest.raises(InvalidSpecError) as caught:
        gang.meet(3_600.0, 60.0, lambda: None)

    assert caught.value.path == field


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "::1", "fe80::1%lo", "job_1-0.job-trainer", "bücher.example."])
def test_addresses_that_may_exist_are_tried(host: str) -> None:
    rendezvous.check_address(host, 29_500)


@pytest.mark.parametrize(
    ("errors", "is_hopeless"),
    [
        ([errno.ENETUNREACH], True),
        ([errno.EAFNOSUPPORT, errno.ENETUNREACH], True),
        ([errno.EACCES], True),
        ([errno.EPERM], True),
        ([errno.ENETUNREACH, errno.ECONNREFUSED], False),
        ([errno.ECONNREFUSED, errno.ENETUNREACH], False),
        ([errno.ETIMEDOUT], False),
        ([errno.EHOSTUNREACH], False),
    ],
)
def test_only_what_fails_at_all_addresses_for_good_is_hopeless(errors: list[int], is_hopeless: bool) -> None:
    failed = ExceptionGroup("failed", [OSError(number, os.strerror(number)) for number in errors])

    problem, fix = rendezvous.explain_failed_connect(failed)

    assert problem == os.strerror(errors[-1])
    assert bool(fix) == is_hopeless


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_NODATA])
def test_a_name_that_does_not_resolve_yet_is_not_hopeless(code: int) -> None:
    assert rendezvous.explain_failed_connect(socket.gaierror(code, "not known")) == ("not known", "")


CLONE_NEWNET = 0x40000000


def meet_in_a_network(route: str, told: Connection) -> None:
    """Wait for rank 0 where nothing can be reached; ``route`` says how connections fail."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    if route:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["ip", "route", "add", route, "192.0.2.0/24"], check=True)
    from dlrm_trainer.distributed import rendezvous

    rendezvous.HOPELESS_AFTER_S = 0.5
    gang = rendezvous.RankGroup(1, 2, "192.0.2.1", 29_500, LOOPBACK)
    try:
        gang.meet(3_600.0 if route != "unreachable" else 2.0, 60.0, lambda: None)
    except PeerLostError as error:
        told.send((str(error), error.exit_code))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2")
@pytest.mark.parametrize(
    ("route", "problem", "fix"),
    [
        ("", errno.ENETUNREACH, "ipFamilies"),
        ("prohibit", errno.EACCES, "policy"),
        ("unreachable", errno.EHOSTUNREACH, ""),
    ],
    ids=["no route", "forbidden", "host that may come"],
)
def test_wait_without_hope_ends_early_and_names_the_fix(route: str, problem: int, fix: str) -> None:
    receiver, sender = gang_context().Pipe(duplex=False)
    process = gang_context().Process(target=meet_in_a_network, args=(route, sender))
    process.start()
    sender.close()

    assert receiver.poll(60)
    message, code = receiver.recv()
    process.join(60)

    assert code == ExitCode.TEMPORARY
    assert message.startswith(f"rank 0 cannot be reached at 192.0.2.1:29500: {os.strerror(problem)}")
    assert fix in message
    assert bool(fix) == ("; " in message)


def serve_rudely(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.slow
def test_a_program_that_is_no_store_at_the_port_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "HOPELESS_AFTER_S", 1.0)
    monkeypatch.setattr(rendezvous, "STORE_TIMEOUT_S", 2)
    with socket.create_server((LOOPBACK, 0)) as listening:
        thread = threading.Thread(target=serve_rudely, args=(listening,))
        thread.start()
        port = listening.getsockname()[1]
        gang = rendezvous.RankGroup(1, 2, LOOPBACK, port, LOOPBACK)

        with pytest.raises(PeerLostError) as caught:
            gang.meet(3_600.0, 60.0, lambda: None)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()

    assert f"{LOOPBACK}:{port}: what listens there does not answer as a rank's store" in str(caught.value)
    assert "\n" not in str(caught.value)


def join_late(rank: int, port: int, told: Connection) -> None:
    from dlrm_trainer.distributed import rendezvous

    rendezvous.HOPELESS_AFTER_S = 0.1
    gang = rendezvous.RankGroup(rank, 2, LOOPBACK, port, LOOPBACK)
    gang.meet(60.0, 60.0, lambda: None)
    told.send(sum_of_ranks(gang.collectives))
    gang.leave("")
    gang.close()


@pytest.mark.slow
def test_a_rank_waits_on_for_a_closed_port() -> None:
    context, port = gang_context(), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=join_late, args=(rank, port, pipes[rank][1])) for rank in range(2)]

    ranks[1].start()
    early = pipes[1][0].poll(2.0)
    ranks[0].start()
    sums = [receiver.recv() for receiver, _ in pipes]
    for rank in ranks:
        rank.join(60)

    assert not early
    assert sums == [1.0, 1.0]
    assert [rank.exitcode for rank in ranks] == [0, 0]


def test_an_interface_that_is_not_there_is_a_setting_to_correct() -> None:
    with pytest.raises(
        InvalidSpecError, match=r"GLOO_SOCKET_IFNAME: network interface not found: nope0; use one of .*lo"
    ):
        rendezvous.check_interfaces({"GLOO_SOCKET_IFNAME": "lo,nope0"})
    rendezvous.check_interfaces({"GLOO_SOCKET_IFNAME": "lo"})
    rendezvous.check_interfaces({})
