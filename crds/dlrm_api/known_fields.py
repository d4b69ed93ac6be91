"""Names of the fields that a model has at a place of its document, as YAML says them."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel


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
        at = _below(at, step)
    if not _is_model(at):
        return None
    near = get_close_matches(str(last), _fields(at), n=1)
    return near[0] if near else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def _below(annotation: Any, step: int | str) -> Any:
    """Type of a field or an element; None where there is none."""
    if _is_model(annotation):
        return plain(_fields(annotation).get(str(step)))
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        return plain(arguments[0])
    return plain(arguments[1]) if origin is dict else None
