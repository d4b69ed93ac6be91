"""Images of pods whose job names none."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version


def _own(name: str) -> str:
    return f"{name}:{version('dlrm-operator')}"


@dataclass(frozen=True, kw_only=True)
class Images:
    """Default images: this version's own, unless the operator's settings say otherwise."""

    trainer: str = field(default_factory=lambda: _own("dlrm-trainer"))
    checkpointer: str = field(default_factory=lambda: _own("dlrm-checkpointer"))
