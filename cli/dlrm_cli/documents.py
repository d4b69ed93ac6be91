"""Manifests on disk: YAML files of several documents, read with the line of whatever is wrong in them."""

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
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.quantities import Duration

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


def check_meta(metadata: Any) -> None:
    """Refuse fields that no object has, a namespace that can't be, and keys or values of labels and annotations.

    Raises:
        InvalidSpecError: names the field.
    """
    if not isinstance(metadata, dict):
        return  # for the models to refuse
    for name in metadata:
        if name not in FIELDS:
            near = get_close_matches(str(name), FIELDS, n=1)
            mend = f"do you mean {near[0]}?" if near else "check its spelling and its place"
            raise InvalidSpecError(f"metadata.{name}", f"unknown field: {mend}")
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and NAMESPACE.fullmatch(namespace)):
        raise InvalidSpecError(
            "metadata.namespace",
            f"{namespace!r} is no namespace: use at most 63 lower-case letters, digits and dashes",
        )
    for field in ("labels", "annotations"):
        _check_texts(f"metadata.{field}", metadata.get(field), labels=field == "labels")


def _check_texts(path: str, texts: Any, *, labels: bool) -> None:
    if texts is None:
        return
    if not isinstance(texts, dict):
        raise InvalidSpecError(path, "must be a mapping of keys to texts")
    for key, value in texts.items():
        if not KEY.fullmatch(str(key)):
            raise InvalidSpecError(
                f"{path}[{key}]",
                "is no key: use at most 63 letters, digits, dashes, dots and underscores, maybe after prefix/",
            )
        if not isinstance(value, str):
            raise InvalidSpecError(f"{path}[{key}]", "must be a text: put it in quotes")
        if labels and not VALUE.fullmatch(value):
            raise InvalidSpecError(
                f"{path}[{key}]",
                f"{value!r} is no value of a label: use at most 63 letters, digits, dashes, dots and underscores",
            )


PARSERS: dict[str, Callable[[Any], DLRMJob | HardwareProfile]] = {
    "DLRMJob": parse_job,
    "HardwareProfile": parse_profile,
}


@dataclass(frozen=True)
class Document:
    """One YAML document of a file, decoded and not yet validated."""

    path: Path
    number: int
    """Place in the file, from 1."""
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """What it says that it is."""
        return str(self.body.get("kind", ""))

    @property
    def title(self) -> str:
        """How messages name it: kind and name."""
        metadata = self.body.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        return f"{self.kind} {name or f'(document {self.number})'}"


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, refusing a key that occurs twice: the first one would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping; see the class."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} occurs twice in one mapping", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_documents(path: Path) -> list[Document]:
    """Read every document of a YAML (or JSON) file; empty documents are left out.

    Raises:
        NoInputError: the file is not there or can't be read.
        BadDataError: it is no YAML, with the line; or a document is no mapping; or there is none at all.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadDataError(f"{path}: byte {error.start} is no UTF-8: save the file as UTF-8 text") from error
    except OSError as error:
        raise NoInputError(f"{path}: {error.strerror or error}: give the path of a readable file") from error
    try:
        bodies = list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise BadDataError(f"{path}{_place(error)}: this is no YAML: {_problem(error)}") from error
    except ValueError as error:  # of a value that looks like a date or number, and is none
        raise BadDataError(f"{path}: a value can't be read ({error}): quote it if it is text") from error
    documents = []
    for number, body in enumerate(bodies, start=1):
        if body is None:
            continue
        if not isinstance(body, dict):
            raise BadDataError(f"{path}: document {number} is a {type(body).__name__}, where a mapping is needed")
        documents.append(Document(path, number, body))
    if not documents:
        raise BadDataError(f"{path}: the file holds no document: write a DLRMJob into it")
    return documents


def parse_document(document: Document) -> DLRMJob | HardwareProfile:
    """Validate one document.

    Raises:
        InvalidSpecError: it is of another kind, or a field is refused; names the field.
        BadDataError: it is YAML that no JSON can say.
    """
    parser = PARSERS.get(document.kind)
    if parser is None:
        raise InvalidSpecError(
            "kind", f"{document.kind or 'nothing'} is none of {', '.join(PARSERS)}: dlrmctl knows no other kind"
        )
    parsed = parser(document.body)
    check_meta(document.body["metadata"])
    return parsed


def only_job(documents: list[Document]) -> Document:
    """The one DLRMJob among them.

    Raises:
        InvalidSpecError: there is none.
        UsageError: there are several.
    """
    jobs = [document for document in documents if document.kind == "DLRMJob"]
    if not jobs:
        first = documents[0]
        raise InvalidSpecError(
            "kind", f"{first.path} holds {first.kind or 'a document without a kind'} and no DLRMJob: give a DLRMJob"
        )
    if len(jobs) > 1:
        titles = ", ".join(document.title for document in jobs)
        raise UsageError(f"{jobs[0].path}: {len(jobs)} jobs ({titles}) in one file: keep one job in each file")
    return jobs[0]


def find_profile(job: DLRMJob, documents: list[Document], extra: Path | None) -> HardwareProfile | None:
    """The profile that the job names, from its own file or from ``--profile``; None where it names none.

    With ``--profile`` and a job that names no hardware, the file's only profile is taken.

    Raises:
        UsageError: the profile that the job names is in neither file; or it names none, and the file has several.
        DLRMError: a profile is bad; names its file.
    """
    wanted = job.spec.trainer.hardware
    others = read_documents(extra) if extra else []
    given = _profiles(others)
    if extra and not given:
        raise UsageError(f"--profile: {extra} holds no HardwareProfile")
    if wanted is None:
        if len(given) > 1:
            raise UsageError(
                f"--profile: {extra} holds {len(given)} HardwareProfiles ({_names(given)}) and the job names none: say "
                f"which, such as --set spec.trainer.hardware={given[0].metadata.name}"
            )
        return given[0] if given else None
    profiles = [*given, *_profiles(documents)]
    for profile in profiles:
        if profile.metadata.name == wanted:
            return profile
    known = _names(profiles) or "none"
    raise UsageError(
        f"spec.trainer.hardware: no HardwareProfile {wanted} (found: {known}): give its file with --profile"
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
    """The same error, saying which file and document it is about."""
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


def seconds(option: str, text: str) -> int:
    """The length of a duration, which is longer than nothing.

    Raises:
        UsageError: it is none; names the option.
    """
    try:
        found = int(TypeAdapter[float](Duration).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"{option}: {first_problem(error)}") from error
    if not found:
        raise UsageError(f"{option}: {text} is no time at all: write something like 90s, 30m or 1h30m")
    return found
