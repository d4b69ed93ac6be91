"""``--set`` and ``--data``: changes to a manifest before it is validated, checked against the API's own models."""

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
    """A copy of a job's document with every ``path=value`` of ``settings`` set, in order.

    A value is read as YAML, so ``2`` is a number, ``[a, b]`` a list and ``null`` takes a field back to its default.

    Raises:
        UsageError: a setting has no ``=``, its value is no YAML, or its path names a field that the API lacks; says
            which fields are there.
    """
    changed = copy.deepcopy(body)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: write it as spec.path=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {setting}: {text!r} is no YAML value: quote it") from error
        _set(changed, path, value)
    return changed


def with_data(body: dict[str, Any], data: str | None, eval_data: str | None) -> dict[str, Any]:
    """A copy of a job's document that reads ``data`` and evaluates on ``eval_data``.

    Where ``eval_data`` is None, ``data`` is evaluated on too if the document has no evaluation files, or the same ones
    as for training.

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
    """Refuse files that are given to a job that makes its samples up and so would read none.

    Args:
        body: The job's document with all its settings applied.
        data: What ``--data`` said.
        eval_data: What ``--eval-data`` said.

    Raises:
        UsageError: names the option.
    """
    given = "--data" if data is not None else "--eval-data" if eval_data is not None else None
    node: Any = body
    for key in ("spec", "data", "format"):
        node = node.get(key) if isinstance(node, dict) else None
    if given is not None and node == "synthetic":
        raise UsageError(
            f"{given}: spec.data.format is synthetic, which reads no files: leave {given} out, or say the files' "
            f"format with --set spec.data.format=parquet (or criteo-tsv)"
        )


def local_uri(option: str, uri: str) -> str:
    """The URI as a manifest holds it: relative paths are from the current folder, whose name a later run can't know.

    Raises:
        UsageError: it is empty, as an unset variable of a shell is; names the option.
    """
    if not uri:
        raise UsageError(f"{option}: the URI is empty: give a file, folder or pattern")
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
    """What ``step`` is to the list or map that it is taken in."""
    if isinstance(node, dict):
        return str(step)
    if isinstance(step, str):
        raise _list_error(path, walked, node)
    if step >= len(node):
        there = f"it has {len(node)} elements, from [0]" if node else "it is empty"
        raise UsageError(f"--set {path}: {walked} has no element [{step}]: {there}")
    return step


def _below(node: Any, key: Any, model: Any, following: str | int) -> Any:
    """The list or map at ``key``, made where there is none; in free-form fields the next step tells which."""
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
    return UsageError(f"--set {path}: {walked} is a list of {len(node)}: write {walked}[0] for its first element")


def _steps(path: str) -> list[str | int]:
    steps: list[str | int] = []
    end = 0
    for match in STEP.finditer(path):
        if match.start() != end:
            break
        steps.append(int(match[2]) if match[2] is not None else match[1] or match[3])
        end = match.end()
    if not steps or end != len(path):
        raise UsageError(f"--set {path}: this is no path: write it like spec.model.tables[0].rows")
    return steps


def _inner(model: Any, step: str | int, path: str, walked: str, node: Any) -> Any:
    """Type of the field or element ``step`` of ``model``; Any below free-form fields."""
    here = walked or "the document"
    if model is Any:
        return Any
    if isinstance(model, type) and issubclass(model, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        fields.pop("status", None)
        if step in fields:
            return plain(fields[str(step)])
        if model.model_config.get("extra") == "allow" and isinstance(step, str):
            return Any
        raise UsageError(f"--set {path}: {here} has no field {step}: it has {', '.join(fields)}")
    origin, arguments = typing.get_origin(model), typing.get_args(model)
    if origin is tuple and isinstance(step, int):
        return plain(arguments[0])
    if origin is dict:
        return plain(arguments[1])
    if origin is tuple:
        raise _list_error(path, walked, node)
    raise UsageError(f"--set {path}: {here} is a single value, with nothing below it")
