"""Images of pods whose job names none."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version

from dlrm_api.plan import Device


def _own(name: str) -> str:
    return f"{name}:{version('dlrm-operator')}"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Default images: this version's own, unless the operator's settings say otherwise."""

    trainer: str = field(default_factory=lambda: _own("dlrm-trainer"))
    trainer_cuda: str = field(default_factory=lambda: _own("dlrm-trainer-cuda"))
    """Of trainers that compute on GPUs."""
    checkpointer: str = field(default_factory=lambda: _own("dlrm-checkpointer"))

    def trainer_on(self, device: Device) -> str:
        """The trainer's image with the kernels of its device."""
        return self.trainer_cuda if device == "cuda" else self.trainer
