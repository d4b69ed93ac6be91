"""Every error that a user may meet. The class says who can act and carries the exit code.

DLRMError
├── UsageError            64  the command line
├── BadDataError          65  a file, row or column of the input
│   ├── DivergedError     65  the loss is no longer finite
│   └── SnapshotError     65  a snapshot is corrupt, of another model, or of a newer version
├── NoInputError          66  a file or snapshot that is not there
├── DeviceError           74  a full or failing disk or memory
├── TemporaryError        75  the same call may succeed later
│   ├── StoreUnavailableError
│   └── PeerLostError
├── NoPermissionError     77  credentials or rights
└── InvalidSpecError      78  the DLRMJob
    ├── InfeasiblePlanError
    └── ObjectiveNotMetError
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
    """Root of all errors with a message that a user can act on. Any other exception that escapes is a bug."""

    exit_code: ExitCode = ExitCode.INTERNAL

    @property
    def lines(self) -> list[str]:
        """Return one message for each fault that it reports."""
        return [str(self)]


class UsageError(DLRMError):
    """Report an invalid command line."""

    exit_code = ExitCode.USAGE


class BadDataError(DLRMError):
    """Report unusable input. The message names the file, the row, the column and the fix."""

    exit_code = ExitCode.BAD_DATA


class DivergedError(BadDataError):
    """Report a loss that became NaN or infinite. The message names the step and the affected table."""


class SnapshotError(BadDataError):
    """Report an unusable snapshot: corrupt, of another model or data, or written by a newer version."""


class NoInputError(DLRMError):
    """Report a file, directory or snapshot that does not exist."""

    exit_code = ExitCode.NO_INPUT


class DeviceError(DLRMError):
    """Report a full or failing disk or memory, or an exhausted system limit. The message names it."""

    exit_code = ExitCode.DEVICE


class TemporaryError(DLRMError):
    """Report a failure that a retry may overcome."""

    exit_code = ExitCode.TEMPORARY


class StoreUnavailableError(TemporaryError):
    """Report that the object store did not answer. The same call may succeed later."""


class PeerLostError(TemporaryError):
    """Report that another rank died or stopped responding. The message names it."""


class NoPermissionError(DLRMError):
    """Report missing or rejected credentials or rights."""

    exit_code = ExitCode.NO_PERMISSION


class InvalidSpecError(DLRMError):
    """Report a spec that can never work. Only the user can fix it; the job is not retried.

    ``path`` is the field as kubectl shows it, for example ``spec.model.tables[2].dim``. ``others`` are more invalid
    fields of the same document, with the problem of each.
    """

    exit_code = ExitCode.BAD_CONFIG

    def __init__(self, path: str, problem: str, others: Sequence[tuple[str, str]] = ()) -> None:
        self.path, self.problem, self.others = path, problem, tuple(others)
        super().__init__("; ".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """Return the message of each invalid field."""
        return [f"{path}: {problem}" for path, problem in [(self.path, self.problem), *self.others]]

    def located(self, where: str) -> InvalidSpecError:
        """Return the same error with ``where`` in front of every path."""
        return InvalidSpecError(f"{where}: {self.path}", self.problem, [(f"{where}: {p}", x) for p, x in self.others])


class InfeasiblePlanError(InvalidSpecError):
    """Report that no placement fits. ``reasons`` name the table, the place and the missing bytes."""

    def __init__(self, path: str, reasons: Sequence[str]) -> None:
        super().__init__(path, "; ".join(reasons))
        self.reasons = tuple(reasons)


class ObjectiveNotMetError(InvalidSpecError):
    """Report that everything costs more than ``trainer.objective`` allows. The message names what comes closest."""


SHOWN_CHARACTERS = 256  # of an invalid value
MAX_FINDINGS = 20
"""Invalid fields that one error names; the others are counted."""
UNKNOWN = "extra_forbidden"
"""pydantic's error type for an unknown field."""
RULE_PREFIX = "Value error, "
"""Prefix that pydantic, and through it typer, puts before the message of a rule."""
PYDANTIC_WORDS = ("Input should ", "String should ", "Decimal input should ")
"""Beginnings of messages that are pydantic's own."""


def invalid_spec(
    error: ValidationError, root: str = "", model: type[BaseModel] | None = None, *, stopped: bool = False
) -> InvalidSpecError:
    """Name each invalid field below ``root`` as kubectl shows it, with the value given.

    Unknown fields come first: an unknown field is often a misspelled required one. With ``model``, the type of the
    document, the message suggests the known field with the most similar name. ``stopped``: reading stopped at the first
    invalid item of a list, so there may be more.
    """
    problems = error.errors(include_url=False, include_input=True)
    problems.sort(key=lambda problem: problem["type"] != UNKNOWN)
    found = [(field_path(each["loc"], root) or "document", _message(each, model)) for each in problems[:MAX_FINDINGS]]
    note = ""
    if stopped:
        note = " (there may be more: the document is too large to count them)"
    elif len(problems) > MAX_FINDINGS:
        note = f" (and {len(problems) - MAX_FINDINGS} more)"
    found[-1] = (found[-1][0], found[-1][1] + note)
    return InvalidSpecError(*found[0], found[1:])


def first_problem(error: ValidationError) -> str:
    """Return the message of the first problem, without its path."""
    return _message(error.errors(include_url=False, include_input=True)[0])


def field_path(steps: Sequence[int | str], root: str = "") -> str:
    """Return the path of a field below ``root`` as kubectl shows it."""
    path = root
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _message(problem: ErrorDetails, model: type[BaseModel] | None = None) -> str:
    # pydantic's own messages speak of Python types or leave out the value.
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            near = nearest_field(model, problem["loc"]) if model else None
            return f"unknown field: do you mean {near}?" if near else "unknown field: check its spelling and its place"
        case "missing":
            return "this field is required"
        case "too_short":
            return f"expected at least {context['min_length']} items, got {context['actual_length']}"
        case "too_long":
            return f"expected at most {context['max_length']} items"
        case "string_pattern_mismatch":
            return f"{problem['input'][:SHOWN_CHARACTERS]!r} does not match {context['pattern']}"
    text = problem["msg"].removeprefix(RULE_PREFIX)
    if not text.startswith(PYDANTIC_WORDS):
        return text
    # Some messages of pydantic end in what kind of value was given.
    expected = text.partition(", got ")[0].replace("Input should be", "must be").replace("dictionary", "mapping")
    return f"{expected}, got {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def plain(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None`` from an annotation."""
    while True:
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            annotation = arguments[0]
        elif type(None) in arguments:
            annotation = next(argument for argument in arguments if argument is not type(None))
        else:
            return annotation


def nearest_field(model: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Return the known field with the name most similar to the last step of a path, or None."""
    at: Any = model
    *above, last = place
    for step in above:
        at = _type_below(at, step)
    if not _is_model(at):
        return None
    near = get_close_matches(str(last), fields_of(at), n=1)
    return near[0] if near else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the annotation of each field, by its name in YAML."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _type_below(annotation: Any, step: int | str) -> Any:
    if _is_model(annotation):
        return plain(fields_of(annotation).get(str(step)))
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
"""Characters that control a terminal, reverse the text order, or are invisible."""


def visible(text: str) -> str:
    r"""Escape control characters of foreign text, as in ``\x1b``; tabs and line ends stay. Idempotent."""
    return _UNSEEN.sub(_written_out, text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
