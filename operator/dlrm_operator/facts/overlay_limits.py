"""What the cluster's admin lets jobs ask of their pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

OverlayLevel = Literal["restricted", "any"]
OVERLAY_LEVELS: Final[tuple[OverlayLevel, ...]] = get_args(OverlayLevel)


@dataclass(frozen=True, kw_only=True)
class OverlayLimits:
    """How far ``spec.trainer.podTemplate`` may go."""

    level: OverlayLevel = "restricted"
    """restricted: no further than Pod Security's level of that name; any: as far as the API server lets pods."""
    own_account: tuple[str, str] | None = None
    """Namespace and name of the operator's service account; None: it does not run as one."""


RESTRICTED: Final = OverlayLimits()
ANY: Final = OverlayLimits(level="any")
