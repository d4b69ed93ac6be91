"""How ranks find each other, and what they say of those that they lose."""

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
from dlrm_trainer.distributed.failures import RollCall, name_ranks
from dlrm_trainer.distributed.gang_store import GangStore

RETRY_S = 0.1
RANK_POLL_S = 0.0005
"""Each rank asks for the others a pause apart that grows by this with each: rank 0's store answers all of them."""
STORE_TIMEOUT_S = 30
NCCL_WAITS = "TORCH_NCCL_BLOCKING_WAIT"
"""Tells torch to raise where a wait for a GPU's collective fails or takes too long, and not to end the process."""


def backends(device: torch.device) -> str:
    """Of ranks that compute on a device, as torch names them: tensors on the host always travel by gloo."""
    return "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


class Gang:
    """The ranks of one attempt, met at rank 0's store. At world size 1 there is nobody to meet.

    Args:
        rank: of this process.
        world_size: number of ranks.
        host: where rank 0 is; a name is looked up again until it resolves.
        port: of the store that rank 0 serves there.
        bind: address that rank 0 serves it on.
        secret: of this attempt, by which its ranks know each other there; empty: they take whoever comes.
    """

    def __init__(self, rank: int, world_size: int, host: str, port: int, bind: str, secret: str = "") -> None:
        self.rank, self.world_size = rank, world_size
        self._host, self._port, self._bind = host, port, bind
        self._secret = secret
        self._store: GangStore | None = None
        self._roll_call: RollCall | None = None
        self.collectives = Collectives(rank, world_size, self._who_is_gone)
        self.id_collectives = Collectives(rank, world_size, self._who_is_gone)
        """For the thread that sends ids."""

    def meet(
        self,
        rendezvous_timeout_s: float,
        collective_timeout_s: float,
        keep_on: Callable[[], None],
        device: torch.device = HOST,
    ) -> None:
        """Wait until all ranks are here.

        Args:
            rendezvous_timeout_s: longest wait for rank 0, and then for the rest.
            collective_timeout_s: longest wait for a silent peer in any later collective.
            keep_on: called between tries; what it raises ends the wait.
            device: that this rank computes on, from which collectives send: all ranks' are of one type.

        Raises:
            PeerLostError: not all came in time, or NCCL finds no way between GPUs; says which are absent as far as can
                be known.
            TemporaryError: rank 0 can't listen on its port.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + rendezvous_timeout_s
        self._store = GangStore(self._serve() if self.rank == 0 else self._reach(deadline, keep_on), self._secret)
        self._store.set(_here(self.rank), "1")
        pause_s = max(RETRY_S / 5, self.world_size * RANK_POLL_S)
        while not self._are_here(range(self.world_size)):
            if time.monotonic() > deadline:
                raise PeerLostError(self._absent(rendezvous_timeout_s))
            keep_on()
            time.sleep(pause_s)
        timeout = timedelta(seconds=collective_timeout_s)
        os.environ.setdefault(NCCL_WAITS, "1")
        dist.init_process_group(
            backends(device),
            store=self._store.for_torch("gang"),  # of no name that a stranger could tell before all ranks are here
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        self.id_collectives.use(dist.new_group(timeout=timeout, backend="gloo"))
        self._call_roll(collective_timeout_s)
        if device.type != "cpu":  # NCCL meets at its first collective, by a store that waits STORE_TIMEOUT_S for rank 0
            self.collectives.all_reduce(torch.zeros(1, device=device))

    def leave(self, last_words: str) -> None:
        """Tell the others that this rank ends, and why; empty words: it ended well, or another rank is to blame."""
        if self._roll_call is not None:
            self._roll_call.close(last_words)

    def close(self) -> None:
        """Give the groups back after the last collective of all ranks: NCCL warns of those left to the end."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call_roll(self, collective_timeout_s: float) -> None:
        assert self._store is not None

        def made() -> int:
            return sum(sum(tuple(each.calls.values())) for each in (self.collectives, self.id_collectives))

        line = self._store.on_its_own_line()
        self._roll_call = RollCall(line, self.rank, self.world_size, made, collective_timeout_s)

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

    def _reach(self, deadline: float, keep_on: Callable[[], None]) -> TCPStore:
        while True:
            keep_on()
            try:
                with socket.create_connection((self._host, self._port), timeout=5.0):
                    break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLostError(f"rank 0 cannot be reached at {self._host}:{self._port}: {error}") from error
                time.sleep(RETRY_S)
        try:
            return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 at {self._host}:{self._port} went away at the start: {error}") from error

    def _are_here(self, ranks: Iterable[int]) -> bool:
        """Whether all of some ranks came: one request, however many they are."""
        assert self._store is not None
        try:
            return self._store.has(map(_here, ranks))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 at {self._host}:{self._port} is gone: {error}") from error

    def _absent(self, waited_s: float) -> str:
        """Who did not come, in words, or came as a pod does whose operator gave it no secret."""
        assert self._store is not None
        absent = [rank for rank in range(self.world_size) if not self._are_here([rank])]
        plain = self._store.without_secret()
        strange = [rank for rank in absent if self._secret and plain.has([_here(rank)])]
        if strange:
            return f"{name_ranks(strange)} came without the gang's secret: another version of the operator made its pod"
        return f"{name_ranks(absent)} did not come within {waited_s:.0f} s: see the logs of its pod"

    def _who_is_gone(self) -> str:
        """Ranks that are dead or hang, or what the first of those that ended had to say."""
        return "" if self._roll_call is None else self._roll_call.who_is_missed()


def _here(rank: int) -> str:
    return f"here/{rank}"
