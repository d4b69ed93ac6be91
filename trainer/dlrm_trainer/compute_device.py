"""Where a rank computes: on the host, or on a GPU of its own."""

from __future__ import annotations

import torch

from dlrm_api.errors import DeviceError, DLRMError, InvalidSpecError
from dlrm_api.plan import Device

HOST = torch.device("cpu")
GPU_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""What torch raises of a GPU that is full or failing, wherever it is next asked for something."""
NONE_THERE = (
    "Found no NVIDIA driver",
    "The NVIDIA driver on your system is too old",
    "No CUDA GPUs are available",
    "Torch not compiled with CUDA",
)
"""What torch's words begin with where waiting does not help; all else a node may get over, or another one lack."""


def take_device(device: Device, local_rank: int) -> torch.device:
    """The device that a plan wants; a GPU becomes this process's current one.

    Args:
        device: of the plan.
        local_rank: of this process among those of its pod: the number of its GPU.

    Raises:
        InvalidSpecError: the plan wants a GPU, and this process has none of its own or no kernels for it.
        DeviceError: the driver is there and gives none.
    """
    if device == "cpu":
        return HOST
    if not torch.cuda.is_available():
        raise _without_gpus()
    from dlrm_trainer.embedding.gpu import made_for_gpus  # loads fbgemm, which takes seconds

    if not made_for_gpus():
        raise InvalidSpecError(
            "plan.device",
            "the plan computes on GPUs, whose kernels the package fbgemm-gpu-cpu lacks: "
            "put fbgemm-gpu in its place, as the trainer's image for GPUs has it",
        )
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise InvalidSpecError(
            "spec.trainer.processesPerReplica",
            f"process {local_rank} of its pod has no CUDA device of its own, there are 0 to {count - 1} alone: "
            f"give the pod a GPU for each process, or make it {count}",
        )
    own = torch.device("cuda", local_rank)
    torch.cuda.set_device(own)
    return own


def _without_gpus() -> DLRMError:
    words = "they were not there, and are now"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # says why, which is_available does not
    except (RuntimeError, AssertionError) as error:
        words = str(error).strip().splitlines()[0]
    if words.startswith(NONE_THERE):
        return InvalidSpecError(
            "plan.device",
            f"the plan computes on GPUs, and this process sees no CUDA device: {words}: mend the node's driver, or the "
            "HardwareProfile's devices and runtimeClass, or name hardware without devices",
        )
    return DeviceError(
        f"the node's GPUs can't be used: {words}: a start later or elsewhere may succeed; where none does, look at the "
        "node's driver, and at its fabric manager if it has NVSwitch"
    )


def named_failure(error: BaseException) -> BaseException:
    """A GPU's own failure as an error that says what to do; any other error as it is."""
    if not isinstance(error, GPU_FAILURES):
        return error
    words = str(error).strip().splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceError(
            f"the rank's GPU is full: {words}: set spec.trainer.tierBudgets.hbm, or lower it, so that tables leave "
            "more of it free, or give a smaller spec.training.microBatchSize"
        )
    return DeviceError(
        f"the rank's GPU failed: {words}: where the kernel log of its node tells of an Xid, drain the node; the next "
        "attempt goes on from the last snapshot"
    )
