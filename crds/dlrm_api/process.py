"""Share what every process does: log, listen, read the machine's limits, name an exhausted limit."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn

from dlrm_api.errors import DeviceError, DLRMError
from dlrm_api.names import ANY_ADDRESS

PACKAGES = ("dlrm_operator", "dlrm_trainer", "dlrm_checkpointer")
"""Packages that log at INFO. All others log at WARNING: some of them are verbose."""

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "settings"}
"""Attributes of every log record, and ``settings``, which kopf adds."""
_KOPF = "k8s_"


class EventFormatter(logging.Formatter):
    """Append a record's ``extra`` to its message as key=value."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging calls it so
        """Return the first line of the record."""
        facts = ((name, value) for name, value in vars(record).items() if name not in _USUAL)
        extra = [f"{name}={_quoted(value)}" for name, value in facts if not name.startswith(_KOPF)]
        return " ".join((super().formatMessage(record), *extra))


def _quoted(value: object) -> str:
    # Values with spaces are quoted, so that each event stays on one line and keys stand out.
    text = str(value)
    plain = text and not any(character.isspace() or character == '"' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def log_to_stderr(who: str) -> None:
    """Log to stderr as ``who``, such as ``rank 0``, in place of handlers that a fork inherits."""
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter(who))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)


def listener(address: str, port: int) -> socket.socket:
    """Return a listening socket; on :data:`ANY_ADDRESS` it accepts IPv6 too if the kernel supports it.

    Raises:
        OSError: the port is in use, or this machine lacks the address.
    """
    if address == ANY_ADDRESS and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


NO_THREAD = "can't start new thread"
"""Message of Python; native libraries report ``EAGAIN``."""
NO_TEMPORARY_DIRECTORY = "No usable temporary directory found"
"""Message of Python if it cannot write to any temporary directory, a full one included."""


def named_limit(error: BaseException) -> BaseException:
    """Turn an exhausted system limit into an error that says what to raise; return others unchanged."""
    words, number = str(error), getattr(error, "errno", None)
    if isinstance(error, DLRMError):
        return error
    if number == errno.EAGAIN or words in (NO_THREAD, os.strerror(errno.EAGAIN)):
        return DeviceError(
            f"cannot start more threads or processes ({words}): raise ulimit -u, the cgroup's pids.max (for pods the "
            "kubelet's podPidsLimit) or, for thread stacks, ulimit -v; or lower processesPerReplica or "
            "threadsPerProcess in spec.trainer"
        )
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in words:
        return DeviceError(f"cannot open more files ({words}): raise ulimit -n")
    if NO_TEMPORARY_DIRECTORY in words:
        return DeviceError(f"cannot write temporary files ({words}): free space there or set TMPDIR")
    if isinstance(error, MemoryError) or number == errno.ENOMEM or os.strerror(errno.ENOMEM) in words:
        return DeviceError(
            f"out of memory ({words or 'MemoryError'}): raise the limit (ulimit -v, the pod's memory) or lower "
            "spec.trainer.tierBudgets.ddr"
        )
    return error


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full device, an exhausted quota or a file size limit."""


def raise_device(error: OSError, path: Path, size: int) -> NoReturn:
    """Report a failed write by its path and size.

    Raises:
        DeviceError: always.
    """
    what = f"write {size} bytes to {path}" if size else f"write {path}"
    fix = "; free space there or raise its size" if error.errno in FULL else ""
    raise DeviceError(f"cannot {what}: {error.strerror or error}{fix}") from error


MOUNT, GROUPS, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
"""The mount of control groups, the process's groups, and how much of the machine's memory is available."""
SYSTEM_SHARE = 20
"""One part in this many of the machine's memory stays with its system."""


def usable_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Return the host memory that this process may use, by machine and control groups (v1 or v2)."""
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    files = ("memory.max", "memory.limit_in_bytes")
    limits = (_number(folder / name) for folder in _folders("memory", mount, groups) for name in files)
    return int(min([machine, *limits]))


def free_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS, memory: Path = MEMORY) -> int:
    """Return the host memory for new processes: usable, less what is in use or kept for the system."""
    usable = usable_memory_bytes(mount, groups)
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(memory), re.MULTILINE)
    return min(usable - usable // SYSTEM_SHARE, int(available[1]) * 1024 if available else usable)


def usable_cpus(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Return the CPUs that this process may use, by affinity and control groups' quotas; at least 1."""
    found = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _folders("cpu", mount, groups):
        found.append(_number(folder / "cpu.cfs_quota_us") / _number(folder / "cpu.cfs_period_us", 1))
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        found.append(int(quota) / int(period) if quota.isdigit() else math.inf)
    return max(1, int(min(found)))


def _folders(controller: str, mount: Path, groups: Path) -> Iterator[Path]:
    """Yield the process's own group and its visible ancestors: each of them limits it."""
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        steps = Path(path.lstrip("/")).parts
        # With "..", the group lies outside of what is mounted here.
        if ".." not in steps:
            yield from (root.joinpath(*steps[:depth]) for depth in range(len(steps), 0, -1))
        yield root


def _number(file: Path, absent: float = math.inf) -> float:
    """Return the file's number; a missing file, a word or a negative number means no limit."""
    text = _text(file)
    return int(text) if text.isdigit() else absent


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


REQUEST_TIMEOUT_S = 10.0


class EndpointServer(ThreadingHTTPServer):
    """Answers on threads that end with the process."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind to either family; unlike HTTPServer, do not ask DNS for the machine's name for seconds."""
        self.socket.close()  # of IPv4 alone
        host, port = self.server_address[:2]
        self.socket = listener(str(host), int(port))
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; anything else is a bug and keeps its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class EndpointHandler(BaseHTTPRequestHandler):
    """Answer requests with a Content-Length; subclasses choose the body."""

    timeout = REQUEST_TIMEOUT_S

    def answer(self, status: int, body: bytes, kind: str) -> None:
        """Send one whole answer; ``kind`` is its content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing: a line a request would drown the log."""
