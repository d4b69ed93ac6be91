"""How fast two ranks of this machine exchange bytes. ``python -m dlrm_cli.probe_exchange RANK PORT`` is one of them."""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from dlrm_api.errors import DeviceError
from dlrm_cli.gang import free_ports
from dlrm_trainer.distributed.rendezvous import Gang

LOOPBACK = "127.0.0.1"
SENT_BYTES = 32 << 20
"""By each rank to the other at a time."""
REPEATS = 10
MEETING_S = 60.0


def exchange_rate() -> float:
    """Bytes/s that each of two ranks sends the other, through the collectives of training.

    Raises:
        DeviceError: they did not meet, or one failed.
    """
    port = str(free_ports(1).rendezvous)
    command = [sys.executable, "-P", "-m", "dlrm_cli.probe_exchange"]
    with (
        subprocess.Popen([*command, "0", port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second,
    ):
        try:
            said, problem = first.communicate()
        finally:
            for rank in (first, second):
                rank.terminate()
    if first.returncode:
        last = problem.strip().splitlines()[-1:] or [f"exit code {first.returncode}"]
        raise DeviceError(f"two ranks of this machine can't exchange bytes: {last[0]}")
    return float(said)


def _exchange(rank: int, port: int) -> float:
    gang = Gang(rank, 2, LOOPBACK, port, LOOPBACK)
    gang.meet(MEETING_S, MEETING_S, lambda: None)
    sent, fastest = torch.ones(2 * SENT_BYTES // 4), float("inf")
    halves = [len(sent) // 2] * 2
    for _ in range(REPEATS):
        gang.collectives.barrier()
        start = time.perf_counter()
        gang.collectives.all_to_all("pooled", sent, halves, halves)
        fastest = min(fastest, time.perf_counter() - start)
    gang.leave("")
    gang.close()
    return SENT_BYTES / fastest


if __name__ == "__main__":
    print(_exchange(int(sys.argv[1]), int(sys.argv[2])))
