"""Read manifests: YAML files of several documents, with the line of whatever is wrong in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from dlrm_api.errors import BadDataError, DLRMError, InvalidSpecError, NoInputError, UsageError, first_problem
from dlrm_api.fields import Duration
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job

FIELDS = (
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def check_metadata(metadata: Any) -> None:
    """Refuse metadata that the API server would refuse: the models accept what it has let pass.

    Raises:
        InvalidSpecError: an unknown field, a bad namespace, or a bad key or value of a label or annotation.
    """
    if not isinstance(metadata, dict):
        # The models refuse it.
        return
    for name in metadata:
        if name not in FIELDS:
            near = get_close_matches(str(name), FIELDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidSpecError(f"metadata.{name}", f"unknown field{hint}")
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and NAMESPACE.fullmatch(namespace)):
        raise InvalidSpecError(
            "metadata.namespace", f"expected at most 63 lower-case letters, digits and dashes, got {namespace!r}"
        )
    for field in ("labels", "annotations"):
        _check_texts(f"metadata.{field}", metadata.get(field), labels=field == "labels")


def _check_texts(path: str, texts: Any, *, labels: bool) -> None:
    if texts is None:
        return
    if not isinstance(texts, dict):
        raise InvalidSpecError(path, "expected a mapping of keys to strings")
    for key, value in texts.items():
        if not KEY.fullmatch(str(key)):
            raise InvalidSpecError(
                f"{path}[{key}]",
                "expected a key of at most 63 letters, digits, dashes, dots and underscores after an optional prefix/",
            )
        if not isinstance(value, str):
            raise InvalidSpecError(f"{path}[{key}]", f"expected a string, got {value!r}; quote it")
        if labels and not VALUE.fullmatch(value):
            raise InvalidSpecError(
                f"{path}[{key}]", f"expected at most 63 letters, digits, dashes, dots and underscores, got {value!r}"
            )


PARSERS: dict[str, Callable[[Any], DLRMJob | HardwareProfile]] = {
    "DLRMJob": parse_job,
    "HardwareProfile": parse_profile,
}


@dataclass(frozen=True)
class Document:
    """Hold one YAML document of a file, decoded but not validated."""

    path: Path
    number: int
    """Position in the file, from 1."""
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return its ``kind``."""
        return str(self.body.get("kind", ""))

    @property
    def title(self) -> str:
        """Return kind and name, as messages show it."""
        metadata = self.body.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return f"{self.kind} {name or f'(document {self.number})'}"


class _Loader(yaml.SafeLoader):
    """Load YAML's safe subset, and refuse a key that occurs twice: the first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping; see the class."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_documents(path: Path) -> list[Document]:
    """Read every document of a YAML (or JSON) file; empty documents are skipped.

    Raises:
        NoInputError: the file does not exist or cannot be read.
        BadDataError: the file has invalid YAML, no document, or a document that is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadDataError(f"{path}: invalid UTF-8 at byte {error.start}: save the file as UTF-8") from error
    except OSError as error:
        raise NoInputError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        bodies = list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise BadDataError(f"{path}{_place(error)}: invalid YAML: {_problem(error)}") from error
    except ValueError as error:
        # For example 2026-02-31, which looks like a date.
        raise BadDataError(f"{path}: invalid value: {error}; quote it if it is text") from error
    documents = []
    for number, body in enumerate(bodies, start=1):
        if body is None:
            continue
        if not isinstance(body, dict):
            raise BadDataError(f"{path}: invalid document {number}: expected a mapping, got a {type(body).__name__}")
        documents.append(Document(path, number, body))
    if not documents:
        raise BadDataError(f"{path}: no documents found; write a DLRMJob into the file")
    return documents


def parse_document(document: Document) -> DLRMJob | HardwareProfile:
    """Validate one document.

    Raises:
        InvalidSpecError: another kind, or an invalid field.
        BadDataError: it is YAML that JSON cannot express.
    """
    parser = PARSERS.get(document.kind)
    if parser is None:
        raise InvalidSpecError("kind", f"expected one of {', '.join(PARSERS)}, got {document.kind or None!r}")
    parsed = parser(document.body)
    check_metadata(document.body["metadata"])
    return parsed


def only_job(documents: list[Document]) -> Document:
    """Return the one DLRMJob among documents.

    Raises:
        InvalidSpecError: there is no such document.
        UsageError: there are several.
    """
    jobs = [document for document in documents if document.kind == "DLRMJob"]
    if not jobs:
        first = documents[0]
        raise InvalidSpecError("kind", f"expected a DLRMJob in {first.path}, got {first.kind or None!r}")
    if len(jobs) > 1:
        titles = ", ".join(document.title for document in jobs)
        raise UsageError(f"{jobs[0].path}: expected one job, got {len(jobs)} ({titles}); put each in a file of its own")
    return jobs[0]


def find_profile(job: DLRMJob, documents: list[Document], extra: Path | None) -> HardwareProfile | None:
    """Return the profile that the job names, from its own file or from ``--profile``; None if it names none.

    If the job names no hardware, the only profile of ``--profile`` is used.

    Raises:
        UsageError: the profile that the job names is in neither file; or it names none, and the file has several.
        DLRMError: a profile is invalid.
    """
    wanted = job.spec.trainer.hardware
    others = read_documents(extra) if extra else []
    given = _profiles(others)
    if extra and not given:
        raise UsageError(f"invalid --profile: no HardwareProfile in {extra}")
    if wanted is None:
        if len(given) > 1:
            raise UsageError(
                f"ambiguous --profile: {extra} has {len(given)} HardwareProfiles ({_names(given)}) and the job names "
                f"none; choose one, for example --set spec.trainer.hardware={given[0].metadata.name}"
            )
        return given[0] if given else None
    profiles = [*given, *_profiles(documents)]
    for profile in profiles:
        if profile.metadata.name == wanted:
            return profile
    known = _names(profiles) or "none"
    raise UsageError(
        f"spec.trainer.hardware: HardwareProfile not found: {wanted} (found: {known}); give its file with --profile"
    )


def _profiles(documents: list[Document]) -> list[HardwareProfile]:
    found = []
    for document in documents:
        if document.kind == "HardwareProfile":
            try:
                found.append(parse_profile(document.body))
            except DLRMError as error:
                raise located(document, error) from error
    return found


def _names(profiles: list[HardwareProfile]) -> str:
    return ", ".join(profile.metadata.name for profile in profiles)


def located(document: Document, error: DLRMError) -> DLRMError:
    """Return the same error with the file and document in front."""
    message = f"{document.path}: {document.title}: {error}"
    if isinstance(error, InvalidSpecError):
        return InvalidSpecError(f"{document.path}: {document.title}: {error.path}", error.problem)
    return type(error)(message)


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" line {mark.line + 1} column {mark.column + 1}" if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    return f"{problem} ({context})" if context else str(problem)


def parse_duration(option: str, text: str) -> int:
    """Return the seconds of an option's duration.

    Raises:
        UsageError: it is not a duration, or not greater than zero.
    """
    try:
        found = int(TypeAdapter[float](Duration).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"invalid {option}: {first_problem(error)}") from error
    if not found:
        raise UsageError(
            f"invalid {option}: expected a duration greater than zero such as 90s, 30m or 1h30m, got {text!r}"
        )
    return found
