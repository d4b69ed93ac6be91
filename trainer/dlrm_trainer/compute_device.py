"""Choose the device that a rank computes on, the host or a GPU of its own, and copy to it and back without waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from dlrm_api.errors import DeviceError, DLRMError, InvalidSpecError
from dlrm_api.plan import Device

HOST = torch.device("cpu")
GPU_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that torch raises at the next call to a GPU that is full or failing."""
_NO_GPU_ERRORS = (
    "Found no NVIDIA driver",
    "The NVIDIA driver on your system is too old",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA",
)
"""Prefixes of torch's errors that retrying cannot fix. Others may go away, or not occur on another node."""
POLL_INTERVAL_S = 50e-6
"""How often the host asks whether a copy from a GPU has ended: a step takes milliseconds."""


def take_device(device: Device, local_rank: int) -> torch.device:
    """Return the plan's device; make GPU ``local_rank``, if it is one, current in this process.

    Raises:
        InvalidSpecError: the plan needs a GPU, and this process has none of its own.
        DeviceError: the driver provides no GPU; a retry or another node may help.
    """
    if device == "cpu":
        return HOST
    if not torch.cuda.is_available():
        raise _without_gpus()
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InvalidSpecError(
            "spec.trainer.processesPerReplica",
            f"expected at most {count}, the CUDA devices of the pod: process {local_rank} has none; "
            "request a GPU for each process, or lower it",
        )
    own = torch.device("cuda", local_rank)
    torch.cuda.set_device(own)
    return own


def _without_gpus() -> DLRMError:
    reason = "they were unavailable and have become available"
    # Unlike is_available, init raises the reason.
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
    if reason.startswith(_NO_GPU_ERRORS):
        return InvalidSpecError(
            "plan.device",
            f"expected a CUDA device, found none: {reason}; fix the node's driver, fix devices and runtimeClass of the "
            "HardwareProfile, or use hardware without devices",
        )
    return DeviceError(
        f"cannot use the node's GPUs: {reason}; the job is retried, and another node may work; if none does, check the "
        "node's driver, and its fabric manager if it has NVSwitch"
    )


def named_failure(error: BaseException) -> BaseException:
    """Return a GPU's failure as a DeviceError that says how to fix it, and any other error unchanged."""
    if not isinstance(error, GPU_FAILURES):
        return error
    reason = str(error).strip().splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"the rank's GPU is full: {reason}; set or lower spec.trainer.tierBudgets.hbm, so that tables leave more "
            "of it free, or lower spec.training.microBatchSize"
        )
    return DeviceError(
        f"the rank's GPU failed: {reason}; drain the node if its kernel log reports an Xid; the next attempt continues "
        "from the last snapshot"
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device; the host does not wait for the copy, nor for kernels before it.

    From memory that is not pinned it would. torch keeps the pinned memory until the copy has ended.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """Copy a tensor to the host; nobody waits for the device until the values are read."""

    def __init__(self, tensor: Tensor) -> None:
        self.end: torch.cuda.Event | None = None
        """Of the copy; None if it has ended."""
        if tensor.device.type != "cuda":
            self._values = tensor.to(HOST, non_blocking=True, copy=True)
            return
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self.end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.end.record()

    def read(self, check: Callable[[], None] = lambda: None) -> Tensor:
        """Wait for the values and return them; ``check`` is called meanwhile, and what it raises ends the wait."""
        while self.end is not None and not self.end.query():  # type: ignore[no-untyped-call]
            check()
            time.sleep(POLL_INTERVAL_S)
        return self._values
