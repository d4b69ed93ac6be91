"""Every error that a user may meet. The class says who can act, and carries the exit code that says it to machines.

DLRMError
├── UsageError            64  the command line
├── BadDataError          65  a file, row or column of the input
│   ├── DivergedError     65  the loss is no longer finite
│   └── SnapshotError     65  a snapshot is corrupt, of another model, or of a newer version
├── NoInputError          66  a file or snapshot that is not there
├── DeviceError           74  a disk or memory that is full or failing
├── TemporaryError        75  the same call may succeed later
│   ├── StoreUnavailableError
│   └── PeerLostError
├── NoPermissionError     77  credentials or rights
└── InvalidSpecError      78  the DLRMJob
    └── InfeasiblePlanError
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dlrm_api.names import ExitCode


class DLRMError(Exception):
    """Root of all errors with a message that a user can act on; anything else that escapes is a bug."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UsageError(DLRMError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class BadDataError(DLRMError):
    """Input that can't be used as it is; the message names the file, the row, the column and the mend."""

    exit_code = ExitCode.BAD_DATA


class DivergedError(BadDataError):
    """The loss became NaN or infinite; the message names the step and the table whose rows went bad."""


class SnapshotError(BadDataError):
    """A snapshot can't be used: corrupt, of another model or data, or written by a newer version."""


class NoInputError(DLRMError):
    """A file, folder or snapshot that was asked for is not there."""

    exit_code = ExitCode.NO_INPUT


class DeviceError(DLRMError):
    """A disk or memory is full or failing, or a limit of the system is met; the message names it, or path and bytes."""

    exit_code = ExitCode.DEVICE


class TemporaryError(DLRMError):
    """Nothing is wrong with the job; the same thing may work later."""

    exit_code = ExitCode.TEMPORARY


class StoreUnavailableError(TemporaryError):
    """The object store did not answer; the same call may succeed later."""


class PeerLostError(TemporaryError):
    """Another rank died or fell silent; the message names it."""


class NoPermissionError(DLRMError):
    """Credentials are missing or refused."""

    exit_code = ExitCode.NO_PERMISSION


class InvalidSpecError(DLRMError):
    """The DLRMJob's spec can never work; only the user can mend it.

    ``path`` is the field as kubectl shows it, such as ``spec.model.tables[2].dim``.
    """

    exit_code = ExitCode.BAD_CONFIG

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class InfeasiblePlanError(InvalidSpecError):
    """No placement of the tables fits the hardware; ``reasons`` say which table, where, and how many bytes short."""

    def __init__(self, path: str, reasons: Sequence[str]) -> None:
        super().__init__(path, "; ".join(reasons))
        self.reasons = tuple(reasons)


SHOWN_CHARACTERS = 256
"""Of a value that was refused."""
UNKNOWN = "extra_forbidden"
"""pydantic's type of the error that a field is not known."""
OF_A_RULE = "Value error, "
"""What pydantic, and typer by it, put in front of a rule's own words."""


def invalid_spec(
    error: ValidationError, root: str = "", model: type[BaseModel] | None = None, *, stopped: bool = False
) -> InvalidSpecError:
    """Name the first refused field below ``root`` the way kubectl shows it, and say how many more there are.

    Unknown fields come first: one is often what a required field was misspelled as.

    Args:
        error: What pydantic found.
        root: Path of the document.
        model: Tells which fields there are: the nearest one to an unknown field is named.
        stopped: Whether reading ended at the first item of a list that was refused, so that there may be more.
    """
    problems = error.errors(include_url=False, include_input=True)
    first = next((problem for problem in problems if problem["type"] == UNKNOWN), problems[0])
    message = _message(first)
    if model and first["type"] == UNKNOWN and (near := nearest_field(model, first["loc"])):
        message = f"unknown field: do you mean {near}?"
    if stopped:
        message += " (there may be more: the document is too large to count them)"
    elif len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    return InvalidSpecError(field_path(first["loc"], root) or "document", message)


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong, in words for users, without its place."""
    return _message(error.errors(include_url=False, include_input=True)[0])


def field_path(steps: Sequence[int | str], root: str = "") -> str:
    """A field below ``root`` the way kubectl shows it."""
    path = root
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _message(problem: ErrorDetails) -> str:
    """What the user reads: pydantic's message, or ours where it speaks of Python or leaves out what was written."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return "unknown field: check its spelling and its place"
        case "missing":
            return "this field is required"
        case "too_short":
            return f"{context['actual_length']} items where at least {context['min_length']} are needed"
        case "too_long":
            return f"more than {context['max_length']} items, the most that are allowed"
        case "string_pattern_mismatch":
            return f"{problem['input'][:SHOWN_CHARACTERS]!r} does not match {context['pattern']}"
    return problem["msg"].removeprefix(OF_A_RULE)


def plain(annotation: Any) -> Any:
    """The annotation without what stands around it: ``Annotated`` and ``| None``."""
    while True:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            annotation = arguments[0]
        elif type(None) in arguments:
            annotation = next(argument for argument in arguments if argument is not type(None))
        else:
            return annotation


def nearest_field(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """The field that is spelled most like the last step of ``place``, of those that could stand there.

    Args:
        model: Of the whole document.
        place: Keys of objects and numbers of elements, down to a field that the model lacks.

    Returns:
        The name, or None where none is near or no model stands there.
    """
    at: Any = model
    *above, last = place
    for step in above:
        at = _type_below(at, step)
    if not _is_model(at):
        return None
    near = get_close_matches(str(last), _fields(at), n=1)
    return near[0] if near else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _type_below(annotation: Any, step: int | str) -> Any:
    """Type of a field or an element; None where there is none."""
    if _is_model(annotation):
        return plain(_fields(annotation).get(str(step)))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return plain(arguments[0])
    return plain(arguments[1]) if origin is dict else None


_UNSEEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1: escape sequences begin here
    "\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    "\ud800-\udfff]"  # halves of pairs: no terminal and no file takes them
    "|\r(?!\n)"
)
"""Characters that steer a terminal, or turn the order of what stands beside them, or are not seen at all."""


def visible(text: str) -> str:
    r"""The text with such characters written out, as in ``\x1b``; tabs and line ends stay. Twice is the same."""
    return _UNSEEN.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
