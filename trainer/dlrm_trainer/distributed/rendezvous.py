"""Let the ranks of an attempt meet at rank 0's store."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dlrm_api.errors import InvalidSpecError, PeerLostError, TemporaryError
from dlrm_api.names import ANY_ADDRESS, Env
from dlrm_api.process import listener
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import FailureDetector, GangStore, name_ranks, report_death
from dlrm_trainer.distributed.nccl import TransportLog
from dlrm_trainer.distributed.two_levels import TwoLevels

RETRY_INTERVAL_S = 0.1
POLL_INTERVAL_PER_RANK_S = 0.0005
"""Ranks poll for the others at an interval that grows by this with each: rank 0's store answers all of them."""
STORE_TIMEOUT_S = 30
REPORT_AFTER_S = 30.0
"""Pods of a gang start within less, unless something is wrong."""
HOPELESS_AFTER_S = 45.0
"""A pod's network is complete before its containers start: what fails for so long without a break stays as it is."""
_NO_ROUTE = (
    "this machine has no route for this kind of address: check ipFamilies of the job's Service and the CNI plugin"
)
_FORBIDDEN = "a policy or route of this machine forbids the connection: allow it between the job's pods"
_FIXES = {
    errno.ENETUNREACH: _NO_ROUTE,
    errno.EAFNOSUPPORT: _NO_ROUTE,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
}
"""What to correct where connections fail in ways that do not pass by themselves."""
GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
"""Makes gloo connect two ranks when the first message goes between them, instead of all ranks at the start."""


def backends(device: torch.device) -> str:
    """Return torch's names of the backends: tensors on the host always travel by gloo."""
    return "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


class RankGroup:
    """Meet the ranks of one attempt at rank 0's store. At world size 1 there is nobody to meet.

    Rank 0 listens at ``bind``. The others look its ``host`` up again until it resolves. Ranks sign what they store with
    the attempt's secret; if it is empty, whoever comes is trusted. ``per_node`` ranks in a row share a pod; in a job of
    several such pods, messages on the host take two levels.
    """

    def __init__(
        self, rank: int, world_size: int, host: str, port: int, bind: str, secret: str = "", *, per_node: int = 1
    ) -> None:
        self.rank, self.world_size, self._per_node = rank, world_size, per_node
        self._host, self._port, self._bind = host, port, bind
        self._secret = secret
        self._store: GangStore | None = None
        self._failures: FailureDetector | None = None
        self.collectives = Collectives(rank, world_size, self._explain_failure)
        self.id_collectives = Collectives(rank, world_size, self._explain_failure)
        """For the thread that sends ids."""
        self.transports: Counter[str] = Counter()
        """Channels between this rank's GPU and others by transport; none before they have met, and on hosts."""

    def meet(
        self,
        rendezvous_timeout_s: float,
        collective_timeout_s: float,
        check: Callable[[], None],
        device: torch.device = HOST,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Wait until all ranks have come: first for rank 0, then for the rest.

        ``collective_timeout_s`` is the longest wait for a silent peer in any later collective. ``check`` is called
        between attempts; what it raises ends the wait. All ranks' devices are of one type. ``waiting`` is told for whom
        this rank waits, once that takes ``REPORT_AFTER_S``, and an empty text when it waits no more.

        Raises:
            InvalidSpecError: the environment names a network interface that this machine lacks, or no valid address.
            PeerLostError: not all came in time, rank 0's address cannot become reachable by waiting, or NCCL cannot
                connect the GPUs; names the absent ranks if known.
            TemporaryError: rank 0 cannot listen on its port.
        """
        if self.world_size == 1:
            return
        check_interfaces(os.environ)
        check_address(self._host, self._port)
        patience = _Patience(rendezvous_timeout_s, waiting)
        self._store = GangStore(self._serve() if self.rank == 0 else self._reach(patience, check), self._secret)
        self._store.set(_here(self.rank), "1")
        pause_s = max(RETRY_INTERVAL_S / 5, self.world_size * POLL_INTERVAL_PER_RANK_S)
        while not self._are_here(range(self.world_size)):
            if patience.is_over():
                raise PeerLostError(self._absent(rendezvous_timeout_s))
            patience.wait(lambda: name_ranks(self._missing()), "they have not come", pause_s)
            check()
        patience.end()
        timeout = timedelta(seconds=collective_timeout_s)
        os.environ.setdefault(GLOO_LAZY, "1")
        transports = TransportLog(os.environ) if device.type == "cuda" else None
        # Without device_id: torch would then ask gloo's groups to connect GPUs. NCCL takes the GPU of a group's first
        # tensor, which is the current one.
        dist.init_process_group(
            backends(device),
            store=self._store.for_torch("gang"),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        channels = self.collectives, self.id_collectives
        for each, group in zip(channels, (None, dist.new_group(timeout=timeout, backend="gloo")), strict=True):
            each.use(group, self._two_levels(timeout))
        self._failures = FailureDetector(
            self._store.clone(),
            self.rank,
            self.world_size,
            lambda: sum(sum(tuple(each.calls.values())) for each in channels),
            collective_timeout_s,
            self.collectives.device_waits.oldest_s,
        )
        for each in channels:
            each.verdict = self._failures.verdict
            each.connect()
        # NCCL connects at its first collective, by a store that waits STORE_TIMEOUT_S for rank 0.
        self.collectives.all_reduce(torch.zeros(1, device=device))
        if transports is not None:
            # Connections are logged by then.
            torch.cuda.synchronize(device)
            self.transports = transports.read()

    def leave(self, reason: str) -> None:
        """Tell the others why this rank ends; empty if it ended well or another rank is to blame."""
        if self._failures is not None:
            self._failures.close(reason)

    def report_death(self, signal_name: str) -> None:
        """Tell the others, from this rank's launcher, which signal killed it; nobody is told if rank 0 is gone."""
        if self.world_size > 1:
            report_death(lambda: GangStore(self._connect(), self._secret), self.rank, signal_name)

    def close(self) -> None:
        """Destroy the process groups after the last collective of all ranks: NCCL warns of those left."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _two_levels(self, timeout: timedelta) -> TwoLevels | None:
        """Return groups of the ranks of this node, and of those with this rank's number on other nodes, if any."""
        if self._per_node in (1, self.world_size):
            return None
        node, number = divmod(self.rank, self._per_node)
        first = node * self._per_node
        members = range(first, first + self._per_node), range(number, self.world_size, self._per_node)
        return TwoLevels(
            *(
                dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
                for ranks in members
            )
        )

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

    def _reach(self, patience: _Patience, check: Callable[[], None]) -> TCPStore:
        hopeless_since = math.inf
        while True:
            check()
            try:
                return self._connect()
            except (OSError, ExceptionGroup, RuntimeError) as error:
                problem, fix = explain_failed_connect(error)
                hopeless_since = min(hopeless_since, time.monotonic()) if fix else math.inf
                if patience.is_over() or time.monotonic() >= hopeless_since + HOPELESS_AFTER_S:
                    hint = f"; {fix}" if fix else ""
                    text = f"rank 0 cannot be reached at {self._host}:{self._port}: {problem}{hint}"
                    raise PeerLostError(text) from error
                patience.wait(lambda: f"rank 0 at {self._host}:{self._port}", problem, RETRY_INTERVAL_S)

    def _connect(self) -> TCPStore:
        # TCPStore would wait for its whole time-out, and cannot be interrupted.
        with socket.create_connection((self._host, self._port), timeout=5.0, all_errors=True):
            pass
        return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))

    def _are_here(self, ranks: Iterable[int]) -> bool:
        """Return whether all of some ranks have come: one request, however many they are."""
        assert self._store is not None
        try:
            return self._store.has(map(_here, ranks))
        except RuntimeError as error:
            raise PeerLostError(f"rank 0 at {self._host}:{self._port} stopped responding: {error}") from error

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._are_here([rank])]

    def _absent(self, waited_s: float) -> str:
        """Name the ranks that did not come, or that came without the secret."""
        assert self._store is not None
        absent = self._missing()
        plain = self._store.without_secret()
        strange = [rank for rank in absent if self._secret and plain.has([_here(rank)])]
        if strange:
            return f"{name_ranks(strange)} came without the attempt's secret; recreate all pods by one operator"
        return f"{name_ranks(absent)} did not come within {waited_s:.0f} s; see the logs of its pod"

    def _explain_failure(self) -> str:
        """Return which ranks are lost, or why the first of them ended."""
        return "" if self._failures is None else self._failures.explain()


class _Patience:
    """Wait for others up to a limit, and say so while it lasts."""

    def __init__(self, limit_s: float, waiting: Callable[[str], None]) -> None:
        self._limit_s, self._waiting = limit_s, waiting
        self._began, self._clock = time.monotonic(), datetime.now(UTC)
        self._report_at = self._began + REPORT_AFTER_S
        self._said = ""

    def is_over(self) -> bool:
        """Return whether the limit has passed."""
        return time.monotonic() > self._began + self._limit_s

    def wait(self, for_whom: Callable[[], str], problem: str, seconds: float) -> None:
        """Sleep for a moment; report at first after ``REPORT_AFTER_S``, then as often, if the report is another."""
        if time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + REPORT_AFTER_S
            whom, limit_s = for_whom(), self._limit_s
            text = f"waiting for {whom} since {self._clock:%H:%M:%S} UTC, for at most {limit_s:.0f} s: {problem}"
            if text != self._said:
                self._said = text
                self._waiting(text)
        time.sleep(seconds)

    def end(self) -> None:
        """Report that the wait is over."""
        if self._said:
            self._waiting("")


def explain_failed_connect(error: Exception) -> tuple[str, str]:
    """Return why rank 0 was not reached, and the fix if waiting cannot help; else an empty text.

    Waiting helps while a name does not resolve or a port is closed, for the pod may still have to start, and while any
    address of the name may still answer.
    """
    if isinstance(error, RuntimeError):
        # torch adds its C++ stack, one frame a line.
        first_line = str(error).partition("\n")[0]
        problem = f"what listens there does not answer as a rank's store ({first_line})"
        return problem, "see which program has this port, and stop it or let it use another"
    errors = error.exceptions if isinstance(error, ExceptionGroup) else [error]
    fixes = [_FIXES.get(getattr(each, "errno", 0), "") for each in errors]
    return getattr(errors[-1], "strerror", None) or str(errors[-1]), fixes[-1] if all(fixes) else ""


def check_address(host: str, port: int) -> None:
    """Check that rank 0's address is one that can exist.

    Raises:
        InvalidSpecError: names the variable with a bad value.
    """
    hint = "the operator and dlrmctl set it: remove it from the pod template"
    if not _is_host(host):
        raise InvalidSpecError(Env.MASTER_ADDR, f"expected a host name or an IP address, got {host!r}; {hint}")
    if not 0 < port < 1 << 16:
        raise InvalidSpecError(Env.MASTER_PORT, f"expected a port from 1 to 65535, got {port}; {hint}")


def _is_host(host: str) -> bool:
    try:
        if ":" in host:
            return bool(ipaddress.ip_address(host))
        if re.fullmatch(r"[\d.]+", host):
            return bool(socket.inet_aton(host))
        name = host.encode("idna").decode()
    except (ValueError, OSError):
        return False
    return bool(re.fullmatch(r"[\w.-]{1,254}", name, re.ASCII))


def check_interfaces(environment: Mapping[str, str]) -> None:
    """Check the network interfaces that gloo is told to use.

    Raises:
        InvalidSpecError: names one that this machine lacks, and those that it has.
    """
    known = {name for _, name in socket.if_nameindex()}
    for name in filter(None, environment.get(GLOO_INTERFACES, "").split(",")):
        if name not in known:
            problem = f"network interface not found: {name}; use one of {', '.join(sorted(known))}, or unset it"
            raise InvalidSpecError(GLOO_INTERFACES, problem)


def _here(rank: int) -> str:
    return f"here/{rank}"
