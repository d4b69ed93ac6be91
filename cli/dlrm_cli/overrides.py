"""Apply ``--set``, ``--data`` and ``--eval-data`` to a manifest before it is validated."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from dlrm_api.errors import UsageError, plain
from dlrm_api.job import DLRMJob

STEP = re.compile(r"(?:^|\.)([^.\[\]]+)|\[(?:(\d+)|([^\[\]]+))\]")
"""A field, ``[0]`` for an element of a list, ``[nvidia.com/gpu]`` for a key of a map."""


def with_overrides(body: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a job's document with every ``path=value`` of ``settings`` set, in order.

    A value is read as YAML: ``2`` is a number, ``[a, b]`` a list, and ``null`` restores a field's default.

    Raises:
        UsageError: a setting has no ``=``, an invalid value, or a path that the API does not have.
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

    Raises:
        UsageError: one of them is empty.
    """
    changed = copy.deepcopy(body)
    if data is None and eval_data is None:
        return changed
    old_train = _uris(changed, "train")
    old_eval = _uris(changed, "eval")
    if data is not None:
        _set(changed, "spec.data.train.uris", [local_uri("--data", data)])
    if eval_data is not None:
        _set(changed, "spec.data.eval.uris", [local_uri("--eval-data", eval_data)])
    elif not old_eval or old_eval == old_train:
        _set(changed, "spec.data.eval.uris", [local_uri("--data", str(data))])
    return changed


def refuse_unread_data(body: dict[str, Any], data: str | None, eval_data: str | None) -> None:
    """Refuse files for a job with synthetic data.

    Args:
        body: The job's document with all its settings applied.
        data: Value of ``--data``.
        eval_data: Value of ``--eval-data``.

    Raises:
        UsageError: names the option.
    """
    given = "--data" if data is not None else "--eval-data" if eval_data is not None else None
    node: Any = body
    for key in ("spec", "data", "format"):
        node = node.get(key) if isinstance(node, dict) else None
    if given is not None and node == "synthetic":
        raise UsageError(
            f"{given} cannot be combined with spec.data.format synthetic, which reads no files; omit {given} or set "
            f"the format with --set spec.data.format=parquet (or criteo-tsv)"
        )


def local_uri(option: str, uri: str) -> str:
    """Return the URI as a manifest holds it: relative paths become absolute, so that a later run finds them.

    Raises:
        UsageError: it is empty, as an unset shell variable is.
    """
    if not uri:
        raise UsageError(f"invalid {option}: expected a file, folder or pattern, got an empty string")
    return uri if "://" in uri else str(Path(uri).absolute())


def _uris(body: dict[str, Any], split: str) -> list[Any]:
    node: Any = body
    for key in ("spec", "data", split, "uris"):
        node = node.get(key) if isinstance(node, dict) else None
    return list(node) if isinstance(node, list) else []


def _set(body: dict[str, Any], path: str, value: Any) -> None:
    steps = _steps(path)
    last = steps[-1]
    node: Any = body
    model: Any = DLRMJob
    walked = ""
    for step, following in pairwise(steps):
        model = _inner(model, step, path, walked, node)
        node = _below(node, _key(node, step, path, walked), model, following)
        walked = _joined(walked, step)
    _inner(model, last, path, walked, node)
    key = _key(node, last, path, walked)
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
    """Return the list or map at ``key``, created if absent. Below free-form fields ``following`` decides which."""
    wanted: type = list if typing.get_origin(model) is tuple else dict
    kinds: tuple[type, ...] = (wanted,)
    if model is Any:
        wanted, kinds = (list if isinstance(following, int) else dict), (list, dict)
    there = node.get(key) if isinstance(node, dict) else node[key]
    if not isinstance(there, kinds):
        there = node[key] = wanted()
    return there


def _joined(walked: str, step: str | int) -> str:
    if isinstance(step, int) or "." in step:
        return f"{walked}[{step}]"
    return f"{walked}.{step}" if walked else step


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
