"""Configure NCCL, and read from its log by what it connects the GPUs of a job."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""With 0 torch does not end a process whose GPU waits too long for others: ``FailureDetector`` names who is lost."""
DEBUG, DEBUG_SUBSYSTEMS, DEBUG_FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
CHANNEL = re.compile(r" NCCL INFO Channel \d+.* via (?P<transport>.+)$", re.MULTILINE)
NETWORK = re.compile(r" NCCL INFO Using network (?P<network>.+)$", re.MULTILINE)
SOCKETS = "NET/Socket"
RDMA_DEVICES = Path("/dev/infiniband")
"""Where a pod finds the RDMA devices that its HardwareProfile requests."""


class TransportLog:
    """Let NCCL log what it connects into a file, unless the environment sets what it logs."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        environment.setdefault(ERROR_HANDLING, "0")
        self._file: Path | None = None
        if DEBUG not in environment:
            descriptor, name = tempfile.mkstemp(prefix="dlrm-nccl-")
            os.close(descriptor)
            self._file = Path(name)
            environment.update({DEBUG: "INFO", DEBUG_SUBSYSTEMS: "INIT", DEBUG_FILE: name})

    def read(self, devices: Path = RDMA_DEVICES) -> Counter[str]:
        """Return the channels by transport that this rank's GPU has now; log them, and remove the file.

        Warns if NCCL has taken sockets although the pod has RDMA devices. Without a file nothing is known.
        """
        if self._file is None:
            return Counter()
        text = self._file.read_text(errors="replace")
        self._file.unlink()
        transports, network = read_transports(text), NETWORK.search(text)
        facts = {"network": network["network"].strip() if network else None, "channels": dict(transports)}
        logger.info("NCCL connected", extra=facts)
        if SOCKETS in transports and devices.exists():
            logger.warning(
                "NCCL uses sockets although the pod has RDMA devices: check network of the HardwareProfile (NCCL's "
                "variables, IPC_LOCK), and libibverbs in the image",
                extra={"devices": str(devices)},
            )
        return transports


def read_transports(log: str) -> Counter[str]:
    """Count the channels of NCCL's log by transport: P2P, SHM, or the network's name such as NET/IB or NET/Socket.

    ``/GDRDMA`` follows if a network card reads and writes the GPU's memory itself.
    """
    found: Counter[str] = Counter()
    for channel in CHANNEL.finditer(log):
        parts = channel["transport"].strip().split("/")
        is_network, is_direct = parts[0] == "NET", any(part.startswith("GDRDMA") for part in parts)
        found["/".join(parts[: 1 + is_network]) + "/GDRDMA" * is_direct] += 1
    return found
