"""Share what every process does: log, listen, read the machine's limits and name a system limit that was met."""

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
"""Whose changes of state are told, at level INFO; of others' packages warnings alone, for some tell pages."""

_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "settings"}
"""What logging puts on every record, and kopf on its own: the settings of its operator."""
_KOPF = "k8s_"


class EventFormatter(logging.Formatter):
    """Puts a record's ``extra`` behind its message, before a traceback."""

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s {who} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging calls it so
        """The first line."""
        extra = [
            f"{name}={_quoted(value)}"
            for name, value in vars(record).items()
            if name not in _USUAL and not name.startswith(_KOPF)
        ]
        return " ".join((super().formatMessage(record), *extra))


def _quoted(value: object) -> str:
    """As it is where it has no space, so that each event stays on one line and its keys can be told from words."""
    text = str(value)
    plain = text and not any(character.isspace() or character == '"' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def log_to_stderr(who: str) -> None:
    """Log this process's events, in place of what a forked process took over from its parent.

    Args:
        who: the process, such as ``rank 0``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(EventFormatter(who))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(logging.INFO)


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens; on :data:`ANY_ADDRESS` for IPv6 as well, where the kernel has it.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    if address == ANY_ADDRESS and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


NO_THREAD = "can't start new thread"
"""Python's word for it; the libraries' is that of ``EAGAIN``."""
NO_PLACE = "No usable temporary directory found"
"""Python's word where none of its folders can be written, for want of space too."""


def named_limit(error: BaseException) -> BaseException:
    """A limit of the system that a process has met, as an error that says which to raise; any other error as it is."""
    words, number = str(error), getattr(error, "errno", None)
    if isinstance(error, DLRMError):
        return error
    if number == errno.EAGAIN or words in (NO_THREAD, os.strerror(errno.EAGAIN)):
        return DeviceError(
            f"the system lets no more threads or processes start ({words}): raise the limit, which is ulimit -u, the "
            "control group's pids.max (of a pod its kubelet's podPidsLimit) or, for threads' stacks, ulimit -v; or "
            "give fewer processesPerReplica or threadsPerProcess in spec.trainer"
        )
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in words:
        return DeviceError(f"the system lets no more files be opened ({words}): raise the limit (ulimit -n)")
    if NO_PLACE in words:
        return DeviceError(
            f"no folder for temporary files can be written ({words}): free space in one of these, or name another by "
            "TMPDIR"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or os.strerror(errno.ENOMEM) in words:
        return DeviceError(
            f"the system gives no more memory ({words or 'out of memory'}): raise the limit (ulimit -v, the pod's "
            "memory), or lower spec.trainer.tierBudgets.ddr"
        )
    return error


FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that say that a device, a quota or a file's size limit is full."""


def raise_device(error: OSError, path: Path, size: int) -> NoReturn:
    """Say which path could not take how many bytes, and why.

    Raises:
        DeviceError: always.
    """
    what = f"write {size} bytes to {path}" if size else f"write {path}"
    mend = "; free space there or raise its size" if error.errno in FULL else ""
    raise DeviceError(f"cannot {what}: {error.strerror or error}{mend}") from error


MOUNT, GROUPS, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")


SYSTEM_SHARE = 20
"""One part in this many of the machine's memory stays with its system."""


def usable_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Return the host memory that this process may use: the machine's, or less by its control groups (v1 or v2).

    Args:
        mount: where control groups are mounted.
        groups: the file that lists the process's groups.
    """
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for folder in _folders("memory", mount, groups):
        found += [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return int(min(found))


def free_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS, memory: Path = MEMORY) -> int:
    """Return the host memory that new processes may take: usable memory, less what is in use or kept for the system.

    Args:
        mount: where control groups are mounted.
        groups: the file that lists the process's groups.
        memory: the file that says how much of the machine's memory is available.
    """
    usable = usable_memory_bytes(mount, groups)
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(memory), re.MULTILINE)
    return min(usable - usable // SYSTEM_SHARE, int(available[1]) * 1024 if available else usable)


def usable_cpus(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Return how many CPUs this process may use, by its affinity and its control groups' quotas; at least one.

    Args:
        mount: where control groups are mounted.
        groups: the file that lists the process's groups.
    """
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
        """Bind to either family, without asking DNS for the machine's full name, as HTTPServer would for seconds."""
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
    """A request whose answers carry their length; subclasses say what is answered."""

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
