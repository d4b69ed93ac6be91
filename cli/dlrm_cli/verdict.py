"""What follows from how processes ended: pure decisions, by the meaning of exit codes and the job's restart policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dlrm_api.errors import (
    BadDataError,
    DeviceError,
    DLRMError,
    InvalidSpecError,
    NoInputError,
    NoPermissionError,
    TemporaryError,
    UsageError,
)
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_MUST_MEND, ExitCode

Action = Literal["fail", "restart", "restart-free"]

ERRORS: dict[int, type[DLRMError]] = {
    error.exit_code: error
    for error in (UsageError, BadDataError, NoInputError, DeviceError, TemporaryError, NoPermissionError)
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended."""

    name: str
    code: int
    """Its exit code; 128 + signal where a signal ended it."""
    message: str = ""
    """What it said itself, for people."""
    log: Path

    @property
    def sentence(self) -> str:
        """What is said of it when the gang starts again."""
        return f"{self.name} ended with {_code_text(self.code)}" + (f": {self.message}" if self.message else "")


def to_blame(endings: Sequence[Ending]) -> Ending:
    """The ending that caused the others: peers of a dead process end too, most of them saying that they lost it."""
    return min(endings, key=lambda ending: (_blame(ending.code), ending.name))


def action_after(code: int, spec: RestartSpec) -> Action:
    """What to do after a gang ended by an exit code: the job's own rules first, then the code's meaning.

    Unlike in a cluster, where the next attempt may get another node, a full or failing disk fails the job at once.
    """
    for rule in spec.rules_by_exit_code:
        if code in rule.exit_codes:
            return rule.action
    if code in USER_MUST_MEND or code == ExitCode.DEVICE:
        return "fail"
    return "restart-free" if code == ExitCode.TERMINATED else "restart"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Restarts that are left, charged and free."""

    spec: RestartSpec
    used: int = 0
    used_free: int = 0
    committed_step: int | None = None
    """Newest committed step when a gang last failed."""

    def charge(self, committed_step: int | None) -> tuple[Budget, float | None]:
        """The budget after one more failure, and the wait before the restart (s); None where none is left.

        The wait has no jitter, unlike in a cluster: nothing else starts again at the same moment.
        """
        healed = self._healed(committed_step)
        charged = replace(healed, used=healed.used + 1)
        if healed.used >= self.spec.max_restarts:
            return charged, None
        return charged, min(self.spec.max_backoff, self.spec.backoff * 2.0 ** min(healed.used, 60))

    def take_free(self, committed_step: int | None) -> Budget | None:
        """The budget after one more restart that is not charged, at once; None where none of these is left."""
        healed = self._healed(committed_step)
        return (
            None if healed.used_free >= self.spec.max_free_restarts else replace(healed, used_free=healed.used_free + 1)
        )

    def _healed(self, committed_step: int | None) -> Budget:
        """Whole again where a step was newly committed."""
        known = committed_step or self.committed_step
        progressed = committed_step is not None and committed_step > (self.committed_step or 0)
        if progressed and self.spec.progress_resets:
            return Budget(spec=self.spec, committed_step=known)
        return replace(self, committed_step=known)


def error_of(ending: Ending) -> DLRMError:
    """The error that ends dlrmctl with the exit code and the words of the process that failed."""
    if ending.code == ExitCode.BAD_CONFIG:
        path, colon, problem = ending.message.partition(": ")
        return InvalidSpecError(path, problem) if colon else InvalidSpecError("spec", ending.message or "refused")
    error = ERRORS.get(ending.code)
    if error is not None and ending.message.strip():
        return error(ending.message)
    said = f": {ending.message}" if ending.message else ""
    text = f"{ending.name} ended with {_code_text(ending.code)}{said}; its log is {ending.log}"
    return (error or DLRMError)(text)


def _blame(code: int) -> int:
    if code in USER_MUST_MEND:
        return 0
    if code == ExitCode.DEVICE:
        return 1
    return (
        {ExitCode.TEMPORARY: 3, ExitCode.TERMINATED: 4, ExitCode.DONE: 5}.get(ExitCode(code), 2) if _known(code) else 2
    )


def _known(code: int) -> bool:
    return code in ExitCode.__members__.values()


def _code_text(code: int) -> str:
    if code > 128 and code != ExitCode.TERMINATED:
        return f"signal {code - 128}" + (" (killed, perhaps for memory)" if code == 137 else "")
    return f"exit code {code}"
