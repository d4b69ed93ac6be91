"""How ranks find each other."""

import socket
from typing import Any

import pytest
from gangs import run_ranks

from dlrm_api.names import ANY_ADDRESS


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
