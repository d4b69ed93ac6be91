"""``python -m dlrm_operator.beside.plan_child``: plans, from standard input to standard output, JSON, one by one.

A message is a line with its length in bytes, then that many bytes. The process ends with its standard input.
"""

from __future__ import annotations

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
from dlrm_operator.objects.tier_volumes import check_mounts
from dlrm_planner import plan_job, read_traces


def main() -> None:
    """Answer questions until there are none."""
    while asked := _read(sys.stdin.buffer):
        signal.alarm(math.ceil(asked["deadline"]) + 1)  # an operator that died must not leave a planner behind
        said = answer(asked)
        signal.alarm(0)
        _write(sys.stdout.buffer, {**said, "resident": _resident_bytes()})


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """``{"plan": …}``, or ``{"refusal": …}`` in the planner's words where there can be none."""
    try:
        profile = parse_profile(asked["profile"]) if asked["profile"] else None
        spec = parse_job(asked["job"]).spec
        plan = plan_job(spec, profile, traces=read_traces(spec, asked["traces"]), reserve=asked["reserve"])
        check_mounts(plan, profile)
    except InvalidSpecError as error:
        return {"refusal": str(error)}
    return {"plan": plan.model_dump(mode="json")}


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
