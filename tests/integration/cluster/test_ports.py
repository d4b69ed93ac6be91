"""Ports are chosen where a killed server finds its own again."""

import os
import socket

from dlrm_cluster.ports import EPHEMERAL_RANGE, LOOPBACK, free_port, listens


def test_a_free_port_can_be_bound_and_is_no_ephemeral_one() -> None:
    first, last = (int(bound) for bound in EPHEMERAL_RANGE.read_text().split())

    port = free_port()

    assert not first <= port <= last
    with socket.socket() as server:
        server.bind((LOOPBACK, port))


def test_only_the_process_that_listens_is_said_to() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK, free_port()))
        port = server.getsockname()[1]
        assert not listens(os.getpid(), port)

        server.listen()

        assert listens(os.getpid(), port)
        assert not listens(os.getppid(), port)
        assert not listens(2**22 + 1, port)
