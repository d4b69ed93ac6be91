"""The GPUs of this machine. ``python -m dlrm_cli.devices`` prints them: who asks CUDA keeps some memory of each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_api.errors import DeviceError

VISIBLE = "CUDA_VISIBLE_DEVICES"
RESOURCE = "nvidia.com/gpu"
"""What NVIDIA's device plugin calls them."""


@dataclass(frozen=True)
class Found:
    """One GPU."""

    name: str
    bytes: int
    """Of its memory."""


def found_devices() -> tuple[Found, ...]:
    """The GPUs that a process of this machine sees; none where torch sees none.

    Raises:
        DeviceError: the driver does not answer as it should.
    """
    command = [sys.executable, "-P", "-m", "dlrm_cli.devices"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or [f"exit code {asked.returncode}"]
        raise DeviceError(f"this machine's GPUs can't be asked for: {last[0]}")
    return tuple(Found(name, size) for name, size in json.loads(asked.stdout))


def visible_to(replica: int, processes: int, environment: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of one of several pods that this machine plays: the GPUs of its processes alone."""
    given = environment.get(VISIBLE)
    first = replica * processes
    names = [str(number) for number in range(first + processes)] if given is None else given.split(",")
    return ",".join(names[first : first + processes])


def _main() -> None:
    import torch

    seen = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    print(json.dumps([(each.name, each.total_memory) for each in seen]))


if __name__ == "__main__":
    _main()
