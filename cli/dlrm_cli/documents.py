"""Read manifests, naming the line of a problem; apply ``--set``, ``--data`` and ``--eval-data``."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dlrm_api.errors import (
    BadDataError,
    DeviceError,
    DLRMError,
    InvalidSpecError,
    NoInputError,
    UsageError,
    first_problem,
    plain,
)
from dlrm_api.fields import Duration
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.names import API_VERSION, GROUP

STDIN = Path("-")
SUFFIXES = (".json", ".yaml", ".yml")
"""Of the files that ``kubectl apply -f FOLDER`` reads."""
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
    """Hold one object of a manifest, decoded but not validated."""

    source: str
    """The file as it was given, or ``stdin``."""
    place: str
    """Where in the file, for objects without a name: ``document 2`` or ``document 1, items[0]``."""
    body: dict[str, Any]

    @property
    def kind(self) -> str:
        """Return its ``kind``."""
        return str(self.body.get("kind", ""))

    @property
    def title(self) -> str:
        """Return kind and name, as messages show it."""
        return f"{self.kind or 'object'} {_dig(self.body, 'metadata', 'name') or f'({self.place})'}"

    @property
    def is_ours(self) -> bool:
        """Return whether it belongs to this API; kubectl applies files with objects of others too."""
        version = self.body.get("apiVersion")
        return self.kind in PARSERS or not self.kind or not version or str(version).startswith(f"{GROUP}/")


class _Loader(yaml.SafeLoader):
    """Load YAML as kubectl does: ``1e3`` is a number, a date is text, and no mapping has a key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping as written, before merge keys (``<<``) add entries that its own override."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
                seen.add(key.value)
        return node

    def construct_exponent(self, node: yaml.ScalarNode) -> int | float:
        """Return a number with an exponent: a whole one is an integer, as in the JSON that kubectl sends."""
        value = float(node.value)
        return int(value) if value.is_integer() else value


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
EXPONENT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d{1,3}$")
_Loader.add_implicit_resolver("!exponent", EXPONENT, list("-+.0123456789"))
_Loader.add_constructor("!exponent", _Loader.construct_exponent)


def parse_value(text: str) -> Any:
    """Decode a YAML value; raise YAMLError or ValueError if the text is not valid YAML."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_documents(path: Path) -> list[Document]:
    """Read every object of a YAML or JSON file, of stdin (``-``), or of a folder's manifests.

    The items of lists, as ``kubectl get`` prints them, count as objects of their own. Empty documents are skipped.

    Raises:
        NoInputError: the file does not exist or cannot be read.
        BadDataError: invalid YAML, no document, or a document that is not a mapping.
    """
    documents = [document for file in _files(path) for document in _read_file(file)]
    if not documents:
        raise BadDataError(f"{_source(path)}: no documents found; write a DLRMJob into the file")
    return documents


def _source(path: Path) -> str:
    return "stdin" if path == STDIN else str(path)


def _files(path: Path) -> list[Path]:
    if path == STDIN or not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
    if not files:
        raise NoInputError(f"{path}: no manifests found; a folder's are its {', '.join(SUFFIXES)} files")
    return files


def _read_file(path: Path) -> list[Document]:
    source = _source(path)
    try:
        text = (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode()
    except UnicodeDecodeError as error:
        raise BadDataError(f"{source}: invalid UTF-8 at byte {error.start}: save the file as UTF-8") from error
    except OSError as error:
        raise NoInputError(f"cannot read {source}: {error.strerror or error}") from error
    try:
        bodies = _decode(text)
    except yaml.YAMLError as error:
        mark, context = getattr(error, "problem_mark", None), getattr(error, "context", None)
        where = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = (getattr(error, "problem", None) or str(error).splitlines()[0]) + (f" ({context})" if context else "")
        raise BadDataError(f"{source}{where}: invalid YAML: {problem}") from error
    except ValueError as error:
        # For example an integer of 5,000 digits.
        raise BadDataError(f"{source}: invalid value: {error}; quote it if it is text") from error
    documents: list[Document] = []
    for number, body in enumerate(bodies, start=1):
        if body is not None:
            documents += _objects(source, f"document {number}", body)
    return documents


def _decode(text: str) -> list[Any]:
    """Decode JSON, whose tabs and surrogate pairs YAML does not take, or YAML."""
    if text.lstrip().startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):  # YAML in flow style
            return [json.loads(text, object_pairs_hook=_unique_keys)]
    return list(yaml.load_all(text, Loader=_Loader))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise yaml.constructor.ConstructorError(None, None, f"duplicate key {twice}")
    return body


def _objects(source: str, place: str, body: Any) -> Iterator[Document]:
    if not isinstance(body, dict):
        raise BadDataError(f"{source}: invalid {place}: expected a mapping, got a {type(body).__name__}")
    if not str(body.get("kind", "")).endswith("List"):
        yield Document(source, place, body)
        return
    items = body.get("items")
    if not isinstance(items, list):
        raise BadDataError(f"{source}: invalid {place}: expected a list of items, got {items!r}")
    for number, item in enumerate(items):
        yield from _objects(source, f"{place}, items[{number}]", item)


def parse_document(document: Document) -> DLRMJob | HardwareProfile:
    """Validate one document; InvalidSpecError for a bad field, BadDataError if JSON cannot express it."""
    if not document.body.get("apiVersion"):
        raise InvalidSpecError("apiVersion", f"missing; write apiVersion: {API_VERSION}")
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
        raise InvalidSpecError("kind", f"expected a DLRMJob in {first.source}, got {first.kind or None!r}")
    if len(jobs) > 1:
        titles = ", ".join(document.title for document in jobs)
        raise UsageError(
            f"{jobs[0].source}: expected one job, got {len(jobs)} ({titles}); put each in a file of its own"
        )
    return jobs[0]


def only_profile(path: Path) -> HardwareProfile:
    """Read a ``--hardware`` file that holds one HardwareProfile; raise UsageError for none or several."""
    found = _profiles(read_documents(path))
    if len(found) != 1:
        names = f" ({_names(found)})" if found else ""
        raise UsageError(f"invalid --hardware: expected one HardwareProfile in {path}, got {len(found)}{names}")
    return found[0]


def find_profiles(job: DLRMJob, documents: list[Document], files: Sequence[Path]) -> tuple[HardwareProfile, ...]:
    """Return the profiles that the job names or selects, from its own file or from those of ``--hardware``.

    If the job names none, they are those of ``--hardware``: several only if the job has an objective to choose by.

    Raises:
        UsageError: a profile is in no file, no profile has the labels, or the job names none of several.
    """
    trainer = job.spec.trainer
    given = list[HardwareProfile]()
    for path in files:
        found = _profiles(read_documents(path))
        if not found:
            raise UsageError(f"invalid --hardware: no HardwareProfile in {path}")
        given += found
    if trainer.hardware is None and not trainer.chooses_hardware:
        if len(given) > 1 and trainer.objective is None:
            raise UsageError(
                f"ambiguous --hardware: {len(given)} HardwareProfiles are given ({_names(given)}) and the job names "
                f"none; choose one, for example --set spec.trainer.hardware={given[0].metadata.name}, or set "
                "spec.trainer.objective to let the plan choose"
            )
        return tuple(given)
    # A profile of --hardware comes before one of the same name in the job's file.
    known: dict[str, HardwareProfile] = {}
    for profile in (*given, *_profiles(documents)):
        known.setdefault(profile.metadata.name, profile)
    if (labels := trainer.hardware_selector) is not None:
        chosen = tuple(
            each for each in known.values() if all(each.metadata.labels.get(key) == labels[key] for key in labels)
        )
        if not chosen:
            raise _unknown_profile("spec.trainer.hardwareSelector", f"with labels {labels}", known)
        return chosen
    if trainer.hardware is not None and trainer.hardware not in known:
        raise _unknown_profile("spec.trainer.hardware", trainer.hardware, known)
    for i, name in enumerate(trainer.hardware_profiles or ()):
        if name not in known:
            raise _unknown_profile(f"spec.trainer.hardwareProfiles[{i}]", name, known)
    return tuple(known[name] for name in trainer.hardware_profiles or (trainer.hardware or "",))


def _unknown_profile(field: str, wanted: str, known: Mapping[str, HardwareProfile]) -> UsageError:
    found = ", ".join(known) or "none"
    return UsageError(f"{field}: HardwareProfile not found: {wanted} (found: {found}); give its file with --hardware")


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
    where = f"{document.source}: {document.title}"
    if isinstance(error, InvalidSpecError):
        return error.located(where)
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
            value = parse_value(text)
        except (yaml.YAMLError, ValueError) as error:
            raise UsageError(f"invalid --set {setting}: expected a YAML value, got {text!r}; quote it") from error
        set_field(changed, path, value)
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
        set_field(changed, "spec.data.train.uris", [local_uri("--data", data)])
    if eval_data is not None:
        set_field(changed, "spec.data.eval.uris", [local_uri("--eval-data", eval_data)])
    elif not old_eval or old_eval == old_train:
        set_field(changed, "spec.data.eval.uris", [local_uri("--data", str(data))])
    return changed


def refuse_unread_data(body: dict[str, Any], data: str | None, eval_data: str | None) -> None:
    """Raise UsageError if files are given for a job whose data, with all settings applied, is synthetic."""
    given = "--data" if data is not None else "--eval-data" if eval_data is not None else None
    if given is not None and _dig(body, "spec", "data", "format") == "synthetic":
        raise UsageError(
            f"{given} cannot be combined with spec.data.format synthetic, which reads no files; omit {given} or set "
            f"the format with --set spec.data.format=parquet (or criteo-tsv, delta, iceberg)"
        )


def local_uri(option: str, uri: str) -> str:
    """Return the URI with an absolute path, so that a later run finds it.

    Raises UsageError if it is empty, as an unset shell variable is.
    """
    if not uri:
        raise UsageError(f"invalid {option}: expected a file, folder or pattern, got an empty string")
    return uri if "://" in uri else str(Path(uri).absolute())


def unquoted_fractions(body: dict[str, Any]) -> list[str]:
    """Return a warning for each fraction among resources: custom resources take only integers and text there."""
    found = []
    for section, kind in product(("trainer", "checkpoint"), ("requests", "limits")):
        amounts = _dig(body, "spec", section, "resources", kind)
        for name, amount in amounts.items() if isinstance(amounts, dict) else ():
            if isinstance(amount, float) and not amount.is_integer():
                field = f"spec.{section}.resources.{kind}.{name}"
                found.append(
                    f"{field}: kubectl apply refuses the number {amount}; write {amount * 1e3:g}m, or quote it"
                )
    return found


def _dig(node: Any, *path: str) -> Any:
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def set_field(body: dict[str, Any], path: str, value: Any, option: str = "--set") -> None:
    """Set a field of a job's document in place; None restores its default.

    Raises:
        UsageError: the API has no such field; names ``option`` and the fields that there are.
    """
    steps, path = _steps(path, option), f"{option} {path}"
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
        raise UsageError(f"invalid {path}: {walked} has no element [{step}]; {expected}")
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
    return UsageError(f"invalid {path}: {walked} is a list of {len(node)}; {walked}[0] is its first element")


def _steps(path: str, option: str) -> list[str | int]:
    steps: list[str | int] = []
    end = 0
    for match in STEP.finditer(path):
        if match.start() != end:
            break
        steps.append(int(match[2]) if match[2] is not None else match[1] or match[3])
        end = match.end()
    if not steps or end != len(path):
        raise UsageError(f"invalid {option} {path}: expected a path such as spec.model.tables[0].rows")
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
        raise UsageError(f"invalid {path}: {here} has no field {step}; expected one of {', '.join(fields)}")
    origin, arguments = typing.get_origin(model), typing.get_args(model)
    if origin is tuple and isinstance(step, int):
        return plain(arguments[0])
    if origin is dict:
        return plain(arguments[1])
    if origin is tuple:
        raise _list_error(path, walked, node)
    raise UsageError(f"invalid {path}: {here} is a single value")


def check_new_file(out: Path) -> None:
    """Refuse an ``--out`` that exists or cannot be written, before the work that it is for; with UsageError."""
    try:
        if out.exists():
            raise UsageError(f"refusing to overwrite {out}; choose another --out")
    except OSError as error:
        raise UsageError(f"invalid --out: {out}: {error.strerror}; choose another file") from error
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UsageError(f"invalid --out: cannot write to folder {out.parent}; choose another file")


def write_new_file(out: Path, text: str) -> None:
    """Write ``--out``, whole or not at all; a failure is a DeviceError."""
    try:
        out.write_text(text)
    except OSError as error:
        with contextlib.suppress(OSError):
            # A part is useless, and the next try would refuse to overwrite it.
            out.unlink()
        raise DeviceError(f"invalid --out: {out}: {error.strerror}; choose another file") from error
