"""``python -m dlrm_operator.clients.plan_child``: plans, from standard input to standard output, JSON, one by one.

A message is a line with its length in bytes, then that many bytes. The process ends with its standard input.

What it may take of memory is bounded: it shares the operator's, and a kubelet that finds too much taken kills both.
"""

from __future__ import annotations

import base64
import json
import math
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_api.plan import plan_to_parts
from dlrm_operator.manifests.tier_volumes import check_mounts
from dlrm_planner import plan_job, read_traces

MOST_BYTES = 224 * 2**20
"""Of memory that a process may take beyond what it has when it starts. 5,000 whole tables over 4,096 ranks take
two thirds of it, and so do as many shards as a plan holds."""
TOO_LARGE = (
    f"spec.trainer: planning takes over {MOST_BYTES // 2**20} MiB of memory, the most that the operator gives it: use "
    "fewer ranks, fewer tables, or fewer tables that are pinned to be split"
)


def main() -> None:
    """Answer questions until there are none."""
    bound_memory(MOST_BYTES)
    while asked := _read(sys.stdin.buffer):
        signal.alarm(math.ceil(asked["deadline"]) + 1)  # an operator that died must not leave a planner behind
        said = answer(asked)
        signal.alarm(0)
        _write(sys.stdout.buffer, {**said, "resident": _resident_bytes()})


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """``{"parts": …}`` of the plan in base64, or ``{"refusal": …, "field": …}`` in words where there can be none."""
    try:
        return {"parts": {name: base64.b64encode(part).decode() for name, part in _plan(asked).items()}}
    except InvalidSpecError as error:
        return {"refusal": str(error), "field": error.path}
    except MemoryError:
        pass  # what planning holds is let go before there are words
    return {"refusal": TOO_LARGE, "field": "spec.trainer"}


def bound_memory(more: int) -> None:
    """Let this process take so many bytes more; beyond them it gets MemoryError.

    What may be written counts (RLIMIT_DATA), not what is reserved: that grows with a node's processors.
    """
    most = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _plan(asked: dict[str, Any]) -> dict[str, bytes]:
    profile = parse_profile(asked["profile"]) if asked["profile"] else None
    spec = parse_job(asked["job"]).spec
    plan = plan_job(spec, profile, traces=read_traces(spec, asked["traces"]), reserve=asked["reserve"])
    check_mounts(plan, profile)
    return plan_to_parts(plan)


def _resident_bytes() -> int:
    """What this process holds now: getrusage's peak would be its parent's, from before exec, where that is larger."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    length = stream.readline()
    if not length:
        return None
    found: dict[str, Any] = json.loads(stream.read(int(length)))
    return found


def _write(stream: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    stream.write(b"%d\n" % len(body) + body)
    stream.flush()


if __name__ == "__main__":
    main()
