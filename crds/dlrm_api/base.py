"""Base of every API type: immutability, camelCase names, rules, strict and tolerant readers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator

from dlrm_api.errors import BadDataError, InvalidSpecError, field_path, invalid_spec

RULES = "x-kubernetes-validations"
"""JSON schema key under which Kubernetes keeps CEL rules."""
WHOLE: Any = {"x-kubernetes-map-type": "atomic"}
"""JSON schema of an object that server-side apply treats as one value with one owner."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Constrain the fields of one object, in CEL for the API server and in Python for everything else.

    A test feeds random manifests to both and compares the verdicts.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    """Shown to the user; names the field and the fix."""


def exclusive(one: str, other: str) -> Rule:
    """Return the rule that at most one of two optional fields is set; both are named as in YAML."""
    # Names are converted once: a rule of tables runs 5,000 times per job, and each conversion takes 6 us.
    first, second = to_snake(one), to_snake(other)
    return Rule(
        cel=f"!(has(self.{one}) && has(self.{other}))",
        holds=lambda spec: getattr(spec, first) is None or getattr(spec, second) is None,
        message=f"{one} and {other} are mutually exclusive: set one of them",
    )


def positive(field: str, effect: str) -> Rule:
    """Return the rule that an optional duration is not 0; ``effect``: what happens without it."""
    name = to_snake(field)
    return Rule(
        cel=f"!has(self.{field}) || self.{field}.matches('[1-9]')",
        holds=lambda spec: getattr(spec, name) != 0,
        message=f"{field} must be longer than 0s: remove it {effect}",
    )


class ApiModel(BaseModel):
    """Base of every API type: immutable, camelCase in YAML, rejects unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True,
        serialize_by_alias=True, validate_default=True, allow_inf_nan=False, protected_namespaces=(),
    )  # fmt: skip

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _obeys_its_rules(self) -> Self:
        for rule in self.rules:
            if not rule.holds(self):
                raise PydanticCustomError("rule", "{message}", {"message": rule.message})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        if cls.rules:
            resolved = handler.resolve_ref_schema(json_schema)
            resolved[RULES] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        return json_schema


MAX_COUNTED_CHARACTERS = 2**17
"""Longest served document of which all errors are counted: two characters can cause an error that takes 1 KiB."""
MAX_KEYS = 1_000
"""Keys of one object in a served document: each unknown key is an error too."""
MAX_VALUES = 250_000
"""Values in a served document: 5,000 tables with every field written out have half as many."""

Model = TypeVar("Model", bound=ApiModel)
YAML_1_1_TEXT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?[0-9]+\.[0-9]*[eE][0-9]+")
"""Numbers such as 1e-3 and 1.5e3, which PyYAML (YAML 1.1) reads as text and kubectl as numbers."""
NUMBER_EXPECTED = ("int_type", "float_type")
"""Types of pydantic's errors about text in a numeric field."""


def read(model: type[Model], document: Any) -> Model:
    """Read a decoded document as strictly as the API server: no text for numbers, no Python names.

    As there, a null field counts as absent, and 2.0 and 1e6 are integers.

    Raises:
        InvalidSpecError: names the first invalid field as kubectl shows it, and how many more there are.
        BadDataError: the YAML has no JSON form, for example because a key is a date.
    """
    # pydantic reports problems below an object only once the object's own fields are valid.
    while True:
        try:
            return _read_json(model, document)
        except ValidationError as error:
            normalized = _normalize(document, error)
            if normalized is None:
                raise invalid_spec(error, model=model) from error
            document = normalized


def read_served(model: type[Model], document: Any) -> Model:
    """Read a document of an API server as strictly as :func:`read`, in bounded memory.

    The server has dropped nulls and normalized numbers already. Of a large document, reading stops at the first invalid
    item of each list.

    Raises:
        InvalidSpecError: names the first invalid field, and how many more there are unless the document is large.
    """
    _check_size(document)
    text = json.dumps(document)
    is_large = len(text) > MAX_COUNTED_CHARACTERS
    validator: Any = stopping_early(model) if is_large else model.__pydantic_validator__
    try:
        found: Model = validator.validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise invalid_spec(error, model=model, stopped=is_large) from error
    return found


def _check_size(document: Any) -> None:
    waiting, values = [document], 0
    while waiting:
        value = waiting.pop()
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict) and len(value) > MAX_KEYS:
            raise InvalidSpecError("document", f"an object has {len(value)} keys, at most {MAX_KEYS} are allowed")
        values += len(inside)
        if values > MAX_VALUES:
            raise InvalidSpecError("document", f"more than {MAX_VALUES} values, the largest number allowed")
        waiting.extend(inside)


@cache
def stopping_early(model: type[ApiModel]) -> SchemaValidator:
    """Return a validator that leaves each list at its first invalid item, to bound memory for errors."""
    return SchemaValidator(_failing_fast(model.__pydantic_core_schema__))


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        found = {key: _failing_fast(value) for key, value in schema.items()}
        return found | {"fail_fast": True} if schema.get("type") in ("tuple", "list") else found
    return [_failing_fast(part) for part in schema] if isinstance(schema, list) else schema


def read_stored(model: type[Model], document: Any, root: str = "") -> tuple[Model, tuple[str, ...]]:
    """Read a stored object as strictly as :func:`read`, but report unknown fields, not reject them.

    Another version of this software may have written them, or the CRD is newer than this code. Returns the model of the
    known fields, and the paths of the unknown ones below ``root`` as kubectl shows them.

    Raises:
        InvalidSpecError: names the first known field that is invalid.
    """
    unknown: list[str] = []
    # pydantic reports problems below an object only once the object's own fields are known.
    while True:
        try:
            return _read_json(model, document), tuple(unknown)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            places = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
            if not places:
                raise invalid_spec(error, root) from error
        unknown += [field_path(place, root) for place in places]
        document = copy.deepcopy(document)
        for *above, last in places:
            del _below(document, above)[last]


def _read_json(model: type[Model], document: Any) -> Model:
    try:
        # YAML readers turn timestamps into dates.
        text = json.dumps(document, default=str)
    except (TypeError, ValueError) as error:
        raise BadDataError(f"not expressible as JSON ({error}): quote keys and remove recursive anchors") from error
    return model.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def _normalize(document: Any, error: ValidationError) -> Any:
    """Return a copy without rejected nulls and with numbers as kubectl sends them; None: no change."""
    normalized = json.loads(json.dumps(document, default=str))
    changed = False
    for problem in error.errors(include_url=False):
        *above, last = problem["loc"] or ("",)
        place = _below(normalized, above)
        value = _below(place, [last])
        if value is None and isinstance(place, dict) and last in place:
            del place[last]
        elif (number := _number(value, problem["type"])) is not None:
            place[last] = number
        else:
            continue
        changed = True
    return normalized if changed else None


def _below(document: Any, steps: Iterable[int | str]) -> Any:
    # pydantic also names keys of maps and branches of unions as steps: those lead nowhere in the document.
    for step in steps:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return None
    return document


def _number(value: Any, problem: str) -> int | float | None:
    """Return the number that kubectl sends for a rejected value, or None if it sends the value unchanged."""
    is_text = isinstance(value, str) and problem in NUMBER_EXPECTED and YAML_1_1_TEXT.fullmatch(value)
    if not is_text and not isinstance(value, float):
        return None
    number = float(value)
    if number.is_integer():
        return int(number)
    return number if is_text else None
