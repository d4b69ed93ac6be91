"""Read manifests, naming the line of a problem; apply ``--set``, ``--data`` and ``--eval-data``."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dlrm_api.errors import BadDataError, DLRMError, InvalidSpecError, NoInputError, UsageError, first_problem, plain
from dlrm_api.fields import Duration
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job

FIELDS = (
    *("annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
    *("generateName", "generation", "labels", "managedFields", "name", "namespace", "ownerReferences"),
    *("resourceVersion", "selfLink", "uid"),
)
NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")


def check_metadata(metadata: Any) -> None:
    """Raise InvalidSpecError for metadata that the API server refuses; the models leave that to it."""
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
        return f"{self.kind} {_dig(self.body, 'metadata', 'name') or f'(document {self.number})'}"


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
        mark, context = getattr(error, "problem_mark", None), getattr(error, "context", None)
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = (getattr(error, "problem", None) or str(error).splitlines()[0]) + (f" ({context})" if context else "")
        raise BadDataError(f"{path}{where}: invalid YAML: {problem}") from error
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
    """Validate one document; InvalidSpecError for a bad field, BadDataError if JSON cannot express it."""
    parser = PARSERS.get(document.kind)
    if parser is None:
        raise InvalidSpecError("kind", f"expected one of {', '.join(PARSERS)}, got {document.kind or None!r}")
    parsed = parser(document.body)
    check_metadata(document.body["metadata"])
    return parsed


def only_job(documents: list[Document]) -> Document:
    """Return the one DLRMJob; raise InvalidSpecError if there is none, UsageError if there are several."""
    jobs = [document for document in documents if document.kind == "DLRMJob"]
    if not jobs:
        first = documents[0]
        raise InvalidSpecError("kind", f"expected a DLRMJob in {first.path}, got {first.kind or None!r}")
    if len(jobs) > 1:
        titles = ", ".join(document.title for document in jobs)
        raise UsageError(f"{jobs[0].path}: expected one job, got {len(jobs)} ({titles}); put each in a file of its own")
    return jobs[0]


def find_profile(job: DLRMJob, documents: list[Document], extra: Path | None) -> HardwareProfile | None:
    """Return the profile that the job names, from its own file or from ``--profile``.

    If the job names none, it is the only one of ``--profile``, or None without that option. Raises UsageError if the
    profile is in neither file, or if the job names none and the file has several.
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
    where = f"{document.path}: {document.title}"
    if isinstance(error, InvalidSpecError):
        return InvalidSpecError(f"{where}: {error.path}", error.problem)
    return type(error)(f"{where}: {error}")


def parse_duration(option: str, text: str) -> int:
    """Return the seconds of an option's duration, or raise UsageError if it is not greater than zero."""
    try:
        found = int(TypeAdapter[float](Duration).validate_python(text))
    except ValidationError as error:
        raise UsageError(f"invalid {option}: {first_problem(error)}") from error
    if not found:
        raise UsageError(
            f"invalid {option}: expected a duration greater than zero such as 90s, 30m or 1h30m, got {text!r}"
        )
    return found


STEP = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(?:(\d+)|([^\[\]]+))\]")
"""A field, ``[0]`` for an element of a list, ``[nvidia.com/gpu]`` for a key of a map."""


def with_overrides(body: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a job's document with every ``path=value`` of ``settings`` set, in order.

    A value is read as YAML: ``2`` is a number, ``[a, b]`` a list, and ``null`` restores a field's default. Raises
    UsageError for a setting without ``=``, an invalid value, or a path that the API does not have.
    """
    changed = copy.deepcopy(body)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"invalid --set {setting}: expected spec.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"invalid --set {setting}: expected a YAML value, got {text!r}; quote it") from error
        _set(changed, path, value)
    return changed


def with_data(body: dict[str, Any], data: str | None, eval_data: str | None) -> dict[str, Any]:
    """Return a copy of a job's document that trains on ``data`` and evaluates on ``eval_data``.

    Without ``eval_data``, ``data`` replaces the evaluation files too, if there are none or the same as for training.
    Raises UsageError if one is empty.
    """
    changed = copy.deepcopy(body)
    if data is None and eval_data is None:
        return changed
    old_train, old_eval = (_dig(changed, "spec", "data", split, "uris") or [] for split in ("train", "eval"))
    if data is not None:
        _set(changed, "spec.data.train.uris", [local_uri("--data", data)])
    if eval_data is not None:
        _set(changed, "spec.data.eval.uris", [local_uri("--eval-data", eval_data)])
    elif not old_eval or old_eval == old_train:
        _set(changed, "spec.data.eval.uris", [local_uri("--data", str(data))])
    return changed


def refuse_unread_data(body: dict[str, Any], data: str | None, eval_data: str | None) -> None:
    """Raise UsageError if files are given for a job whose data, with all settings applied, is synthetic."""
    given = "--data" if data is not None else "--eval-data" if eval_data is not None else None
    if given is not None and _dig(body, "spec", "data", "format") == "synthetic":
        raise UsageError(
            f"{given} cannot be combined with spec.data.format synthetic, which reads no files; omit {given} or set "
            f"the format with --set spec.data.format=parquet (or criteo-tsv)"
        )


def local_uri(option: str, uri: str) -> str:
    """Return the URI with an absolute path, so that a later run finds it.

    Raises UsageError if it is empty, as an unset shell variable is.
    """
    if not uri:
        raise UsageError(f"invalid {option}: expected a file, folder or pattern, got an empty string")
    return uri if "://" in uri else str(Path(uri).absolute())


def _dig(node: Any, *path: str) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _set(body: dict[str, Any], path: str, value: Any) -> None:
    steps = _steps(path)
    node: Any = body
    model: Any = DLRMJob
    walked = ""
    for step, following in pairwise(steps):
        model = _inner(model, step, path, walked, node)
        node = _below(node, _key(node, step, path, walked), model, following)
        walked = f"{walked}[{step}]" if isinstance(step, int) or "." in step else f"{walked}.{step}".lstrip(".")
    _inner(model, steps[-1], path, walked, node)
    key = _key(node, steps[-1], path, walked)
    if value is None and isinstance(node, dict):
        node.pop(key, None)
    else:
        node[key] = value


def _key(node: Any, step: str | int, path: str, walked: str) -> Any:
    """Return what ``step`` is to the list or map that it is taken in."""
    if isinstance(node, dict):
        return str(step)
    if isinstance(step, str):
        raise _list_error(path, walked, node)
    if step >= len(node):
        expected = f"expected an index below {len(node)}" if node else "the list is empty"
        raise UsageError(f"invalid --set {path}: {walked} has no element [{step}]; {expected}")
    return step


def _below(node: Any, key: Any, model: Any, following: str | int) -> Any:
    """Return the list or map at ``key``, created if absent; in free-form fields ``following`` says which."""
    wanted: type = list if typing.get_origin(model) is tuple else dict
    kinds: tuple[type, ...] = (wanted,)
    if model is Any:
        wanted, kinds = (list if isinstance(following, int) else dict), (list, dict)
    there = node.get(key) if isinstance(node, dict) else node[key]
    if not isinstance(there, kinds):
        there = node[key] = wanted()
    return there


def _list_error(path: str, walked: str, node: list[Any]) -> UsageError:
    return UsageError(f"invalid --set {path}: {walked} is a list of {len(node)}; {walked}[0] is its first element")


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    end = 0
    for match in STEP.finditer(path):
        if match.start() != end:
            break
        steps.append(int(match[2]) if match[2] is not None else match[1] or match[3])
        end = match.end()
    if not steps or end != len(path):
        raise UsageError(f"invalid --set {path}: expected a path such as spec.model.tables[0].rows")
    return steps


def _inner(model: Any, step: str | int, path: str, walked: str, node: Any) -> Any:
    """Return the type of the field or element ``step`` of ``model``; Any below free-form fields."""
    here = walked or "a manifest"
    if model is Any:
        return Any
    if isinstance(model, type) and issubclass(model, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        fields.pop("status", None)
        if step in fields:
            return plain(fields[str(step)])
        if model.model_config.get("extra") == "allow" and isinstance(step, str):
            return Any
        raise UsageError(f"invalid --set {path}: {here} has no field {step}; expected one of {', '.join(fields)}")
    origin, arguments = typing.get_origin(model), typing.get_args(model)
    if origin is tuple and isinstance(step, int):
        return plain(arguments[0])
    if origin is dict:
        return plain(arguments[1])
    if origin is tuple:
        raise _list_error(path, walked, node)
    raise UsageError(f"invalid --set {path}: {here} is a single value")
