"""What NCCL's log says of the transports that it took; lines as NCCL 2.27 and 2.30 write them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dlrm_trainer.distributed.nccl import DEBUG, DEBUG_FILE, TransportLog, read_transports

INFINIBAND = """
node-1:41:52 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.5<0>
node-1:41:52 [0] NCCL INFO Using network IB
node-1:41:60 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node-1:41:60 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node-1:41:60 [0] NCCL INFO Channel 00/0 : 9[1] -> 0[0] [receive] via NET/IB/1/GDRDMA
node-1:41:60 [0] NCCL INFO Channel 01/0 : 0[0] -> 9[1] [send] via NET/IB/1
node-1:41:60 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
SOCKETS = """
node-1:41:52 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node-1:41:52 [0] NCCL INFO Using network Socket
node-1:41:60 [0] NCCL INFO Channel 00/02 : 0 1
node-1:41:60 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node-1:41:60 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-1:41:60 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA(PCI)
"""


def test_channels_are_counted_by_transport() -> None:
    assert read_transports(INFINIBAND) == {"P2P": 2, "NET/IB": 1, "NET/IB/GDRDMA": 1}
    assert read_transports(SOCKETS) == {"SHM": 1, "NET/Socket": 1, "NET/AWS Libfabric/GDRDMA": 1}
    assert read_transports("") == {}


@pytest.mark.parametrize(
    ("log", "has_devices", "warns"), [(SOCKETS, True, True), (SOCKETS, False, False), (INFINIBAND, True, False)]
)
def test_sockets_are_warned_of_where_the_pod_has_rdma_devices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log: str, has_devices: bool, warns: bool
) -> None:
    environment: dict[str, str] = {}
    transports = TransportLog(environment)
    Path(environment[DEBUG_FILE]).write_text(log)
    devices = tmp_path if has_devices else tmp_path / "absent"

    with caplog.at_level(logging.INFO):
        found = transports.read(devices)

    assert found == read_transports(log)
    assert any(record.levelno == logging.WARNING for record in caplog.records) == warns
    assert not Path(environment[DEBUG_FILE]).exists()


def test_what_the_user_logs_of_nccl_stays_where_the_user_wants_it() -> None:
    environment = {DEBUG: "WARN"}

    assert TransportLog(environment).read() == {}
    assert DEBUG_FILE not in environment
