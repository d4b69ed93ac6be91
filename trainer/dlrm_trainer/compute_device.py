"""Where a rank computes: on the host, or on a GPU of its own."""

from __future__ import annotations

import torch

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import Device

HOST = torch.device("cpu")


def take_device(device: Device, local_rank: int) -> torch.device:
    """The device that a plan wants; a GPU becomes this process's current one.

    Args:
        device: of the plan.
        local_rank: of this process among those of its pod: the number of its GPU.

    Raises:
        InvalidSpecError: the plan wants a GPU, and this process has none of its own or no kernels for it.
    """
    if device == "cpu":
        return HOST
    if not torch.cuda.is_available():
        raise InvalidSpecError("plan.device", "the plan computes on GPUs, and this process sees no CUDA device")
    from dlrm_trainer.embedding.device import made_for_gpus  # loads fbgemm, which takes seconds

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
