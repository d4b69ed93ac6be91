"""Let the ranks of an attempt meet at rank 0's store."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dlrm_api.errors import PeerLostError, TemporaryError
from dlrm_api.names import ANY_ADDRESS
from dlrm_api.process import listener
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import FailureDetector, GangStore, name_ranks

RETRY_INTERVAL_S = 0.1
POLL_INTERVAL_PER_RANK_S = 0.0005
"""Ranks poll for the others at an interval that grows by this with each: rank 0's store answers all of them."""
STORE_TIMEOUT_S = 30
NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Makes torch raise if a wait for a GPU's collective fails or times out, instead of ending the process."""


def backends(device: torch.device) -> str:
    """Return torch's names of the backends: tensors on the host always travel by gloo."""
    return "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


class RankGroup:
    """Meet the ranks of one attempt at rank 0's store. At world size 1 there is nobody to meet.

    Rank 0 listens at ``bind``. The others look its ``host`` up again until it resolves. Ranks sign what they store with
    the attempt's secret; if it is empty, whoever comes is trusted.
    """

    def __init__(self, rank: int, world_size: int, host: str, port: int, bind: str, secret: str = "") -> None:
        self.rank, self.world_size = rank, world_size
        self._host, self._port, self._bind = host, port, bind
        self._secret = secret
        self._store: GangStore | None = None
        self._failures: FailureDetector | None = None
        self.collectives = Collectives(rank, world_size, self._explain_failure)
        self.id_collectives = Collectives(rank, world_size, self._explain_failure)
        """For the thread that sends ids."""

    def meet(
        self,
        rendezvous_timeout_s: float,
        collective_timeout_s: float,
        check: Callable[[], None],
        device: torch.device = HOST,
    ) -> None:
        """Wait until all ranks have come: first for rank 0, then for the rest.

        ``collective_timeout_s`` is the longest wait for a silent peer in any later collective. ``check`` is called
        between attempts; what it raises ends the wait. All ranks' devices are of one type.

        Raises:
            PeerLostError: not all came in time, or NCCL cannot connect the GPUs; names the absent ranks if known.
            TemporaryError: rank 0 cannot listen on its port.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + rendezvous_timeout_s
        self._store = GangStore(self._serve() if self.rank == 0 else self._reach(deadline, check), self._secret)
        self._store.set(_here(self.rank), "1")
        pause_s = max(RETRY_INTERVAL_S / 5, self.world_size * POLL_INTERVAL_PER_RANK_S)
        while not self._are_here(range(self.world_size)):
            if time.monotonic() > deadline:
                raise PeerLostError(self._absent(rendezvous_timeout_s))
            check()
            time.sleep(pause_s)
        timeout = timedelta(seconds=collective_timeout_s)
        os.environ.setdefault(NCCL_BLOCKING_WAIT, "1")
        dist.init_process_group(
            backends(device),
            store=self._store.for_torch("gang"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        self.id_collectives.use(dist.new_group(timeout=timeout, backend="gloo"))
        channels = self.collectives, self.id_collectives
        self._failures = FailureDetector(
            self._store.clone(),
            self.rank,
            self.world_size,
            lambda: sum(sum(tuple(each.calls.values())) for each in channels),
            collective_timeout_s,
        )
        # NCCL connects at its first collective, by a store that waits STORE_TIMEOUT_S for rank 0.
        if device.type != "cpu":
            self.collectives.all_reduce(torch.zeros(1, device=device))

    def leave(self, reason: str) -> None:
        """Tell the others why this rank ends; empty if it ended well or another rank is to blame."""
        if self._failures is not None:
            self._failures.close(reason)

    def close(self) -> None:
        """Destroy the process groups after the last collective of all ranks: NCCL warns of those left."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _serve(self) -> TCPStore:
        try:
            listening = listener(self._bind, self._port)
        except OSError as error:
            raise TemporaryError(
                f"rank 0 cannot listen on {self._bind}:{self._port}: {error.strerror}; free the port or choose another"
            ) from error
        return TCPStore(
            "127.0.0.1" if self._bind == ANY_ADDRESS else self._bind,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listening.detach(),
        )

    def _reach(self, deadline: float, check: Callable[[], None]) -> TCPStore:
        while True:
            check()
            try:
                with socket.create_connection((self._host, self._port), timeout=5.0):
                    break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLostError(f"rank 0 cannot be reached at {self._host}:{self._port}: {error}") from error
                time.sleep(RETRY_INTERVAL_S)
        try:
            return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 at {self._host}:{self._port} closed the connection: {error}") from error

    def _are_here(self, ranks: Iterable[int]) -> bool:
        """Return whether all of some ranks have come: one request, however many they are."""
        assert self._store is not None
        try:
            return self._store.has(map(_here, ranks))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 at {self._host}:{self._port} stopped responding: {error}") from error

    def _absent(self, waited_s: float) -> str:
        """Name the ranks that did not come, or that came without the secret."""
        assert self._store is not None
        absent = [rank for rank in range(self.world_size) if not self._are_here([rank])]
        plain = self._store.without_secret()
        strange = [rank for rank in absent if self._secret and plain.has([_here(rank)])]
        if strange:
            return f"{name_ranks(strange)} came without the attempt's secret; recreate all pods by one operator"
        return f"{name_ranks(absent)} did not come within {waited_s:.0f} s; see the logs of its pod"

    def _explain_failure(self) -> str:
        """Return which ranks are lost, or why the first of them ended."""
        return "" if self._failures is None else self._failures.explain()


def _here(rank: int) -> str:
    return f"here/{rank}"
