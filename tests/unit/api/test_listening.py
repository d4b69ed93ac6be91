"""Who is heard: a pod's address may be of either family."""

import socket
from contextlib import closing

import pytest

from dlrm_api.names import ANY_ADDRESS
from dlrm_api.process import listener

BOTH = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")


def heard(listening: socket.socket, host: str) -> bool:
    try:
        with socket.create_connection((host, listening.getsockname()[1]), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=BOTH)])
def test_all_interfaces_are_those_of_both_families(host: str) -> None:
    with closing(listener(ANY_ADDRESS, 0)) as listening:
        assert heard(listening, host)


@BOTH
@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_is_that_one_alone(address: str, other: str) -> None:
    with closing(listener(address, 0)) as listening:
        assert heard(listening, address)
        assert not heard(listening, other)


def test_a_kernel_without_ipv6_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)

    with closing(listener(ANY_ADDRESS, 0)) as listening:
        assert listening.family is socket.AF_INET
        assert heard(listening, "127.0.0.1")


@pytest.mark.parametrize("holder", ["127.0.0.1", ANY_ADDRESS])
def test_a_port_that_is_taken_is_an_error(holder: str) -> None:
    with closing(listener(holder, 0)) as held, pytest.raises(OSError, match="in use"):
        listener(ANY_ADDRESS, held.getsockname()[1])
