"""What every API type shares: immutability, camelCase names, rules said once for Python and CEL, and refusals."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema

from dlrm_api.errors import BadDataError, InvalidSpecError, field_path, invalid_spec

NOT_BUILT = "x-dlrm-not-built"
"""JSON schema key under which :class:`NotBuilt` leaves the allowed values for the CRD generator."""

RULES = "x-kubernetes-validations"
"""JSON schema key under which Kubernetes keeps CEL rules."""


WHOLE: Any = {"x-kubernetes-map-type": "atomic"}
"""JSON schema of an object that server-side apply takes as one value: one owner, and no list of the fields in it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What fields of one object may not be together, in CEL for the API server and in Python for the rest.

    Both say the same thing; a test feeds each bad manifest to both and compares the refusals.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    """Names the field and the mend, as the user reads it."""


class ApiModel(BaseModel):
    """Base of every API type: immutable, camelCase in YAML, refuses fields that it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

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


@dataclass(frozen=True)
class NotBuilt:
    """Marks a field whose behaviour this version lacks; whoever sets it is told so instead of being ignored.

    A field of which part is built names the built values in ``allowed``; None (the field left out) always passes.
    """

    allowed: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._refuse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler(schema)
        json_schema[NOT_BUILT] = list(self.allowed)
        return json_schema

    def message(self, field: str) -> str:
        """The refusal that a user reads; ``field`` is the name as in YAML."""
        if self.allowed in ((), (False,)):
            return f"{field} is not built in this version: leave it out"
        if len(self.allowed) == 1:
            return f"{field}: only {self.allowed[0]} is built in this version: use it or leave the field out"
        values = ", ".join(str(value) for value in self.allowed)
        return f"{field}: only {values} are built in this version: use one of them or leave the field out"

    def _refuse(self, value: Any, info: core_schema.ValidationInfo[Any]) -> Any:
        if value is None or value in self.allowed:
            return value
        message = self.message(to_camel(info.field_name or "this field"))
        raise PydanticCustomError("not_built", "{message}", {"message": message})


COUNTED_CHARACTERS = 2**17
"""All that is wrong with a document of strangers is counted where it is no longer than this: an error may take two
characters, and 1 KiB of memory."""
MOST_KEYS = 1_000
"""Of one object of theirs: each key that is not known is an error too."""
MOST_VALUES = 250_000
"""Of such a document. 5,000 tables with every field written out hold half of them; one may take 768 bytes to read."""

Model = TypeVar("Model", bound=ApiModel)
YAML_1_1_TEXT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?[0-9]+\.[0-9]*[eE][0-9]+")
"""Numbers that YAML 1.1 readers, such as PyYAML, take for text, and kubectl does not: 1e-3, 1.5e3."""
NUMBER_MEANT = ("int_type", "float_type")
"""Types of pydantic's errors about text where only a number is meant."""


def read(model: type[Model], document: Any) -> Model:
    """Read a decoded YAML or JSON document as strictly as the API server: no text for numbers, no Python names.

    As there, a field that holds null is left out, and 2.0 and 1e6 are integers.

    Raises:
        InvalidSpecError: names the first refused field as kubectl shows it, and how many more there are.
        BadDataError: YAML that no JSON can say, such as a date for a key.
    """
    while True:  # a model may show what lies below it only once its own fields are good
        try:
            return _read_json(model, document)
        except ValidationError as error:
            mended = _as_the_server_takes_it(document, error)
            if mended is None:
                raise invalid_spec(error, model=model) from error
            document = mended


def read_served(model: type[Model], document: Any) -> Model:
    """Read what claims to come from an API server as strictly as :func:`read`, in little memory whatever it holds.

    The server has left nulls out and written numbers as such, so nothing is mended. Reading stops at the first item of
    each list that is refused.

    Raises:
        InvalidSpecError: names the first refused field; and how many more there are, unless the document is large.
    """
    _check_size(document)
    text = json.dumps(document)
    try:
        found: Model = stopping_early(model).validate_json(text, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        if len(text) > COUNTED_CHARACTERS:
            raise invalid_spec(error, model=model, stopped=True) from error
        try:
            model.model_validate_json(text, strict=True, by_alias=True, by_name=False)
        except ValidationError as every:
            raise invalid_spec(every, model=model) from every
        raise AssertionError("a document that was refused is read after all") from error
    return found


def _check_size(document: Any) -> None:
    left, values = [document], 0
    while left and values <= MOST_VALUES:
        value = left.pop()
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            words = f"an object has {len(value)} keys, where at most {MOST_KEYS} are read: give fewer"
            raise InvalidSpecError("document", words)
        values += len(inside)
        if values <= MOST_VALUES:
            left.extend(inside)
    if values > MOST_VALUES:
        raise InvalidSpecError("document", f"more than {MOST_VALUES} values, the most that are read: give fewer")


@cache
def stopping_early(model: type[ApiModel]) -> SchemaValidator:
    """A model's validator for strangers' documents: it leaves a list at its first bad item, for each makes an error."""
    return SchemaValidator(_failing_fast(model.__pydantic_core_schema__))


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        found = {key: _failing_fast(value) for key, value in schema.items()}
        return found | {"fail_fast": True} if schema.get("type") in ("tuple", "list") else found
    return [_failing_fast(part) for part in schema] if isinstance(schema, list) else schema


def read_stored(model: type[Model], document: Any, root: str = "") -> tuple[Model, tuple[str, ...]]:
    """Read what the API server stores as strictly as :func:`read` does, but for fields that are not known here.

    Another version of ours may have written them, or the definition is newer than this code.

    Args:
        model: Whose document it is.
        document: Decoded JSON.
        root: Path of the document.

    Returns:
        The model of the fields that are known, and the paths of the others as kubectl shows them.

    Raises:
        InvalidSpecError: names the first refused field; the known ones can't be read either.
    """
    unknown: list[str] = []
    while True:  # a model may show what lies below it only once its own fields are known
        try:
            return _read_json(model, document), tuple(unknown)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            places = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
            if not places:
                raise invalid_spec(error, root) from error
        unknown += [field_path(place, root) for place in places]
        document = _without(document, places)


def _without(document: Any, places: Iterable[tuple[int | str, ...]]) -> Any:
    """A copy that lacks the fields at these places."""
    left = copy.deepcopy(document)
    for *above, last in places:
        place = left
        for step in above:
            place = place[step]
        del place[last]
    return left


def _read_json(model: type[Model], document: Any) -> Model:
    try:
        text = json.dumps(document, default=str)  # YAML readers make dates of timestamps
    except (TypeError, ValueError) as error:
        raise BadDataError(f"no JSON can say this ({error}): quote keys, and let no anchor hold itself") from error
    return model.model_validate_json(text, strict=True, by_alias=True, by_name=False)


def _as_the_server_takes_it(document: Any, error: ValidationError) -> Any:
    """A copy without refused nulls of fields, and with numbers as kubectl sends them; None where it has neither."""
    mended = json.loads(json.dumps(document, default=str))
    changed = False
    for problem in error.errors(include_url=False):
        *above, last = problem["loc"] or ("",)
        place = _below(mended, above)
        value = _below(place, [last])
        if value is None and isinstance(place, dict) and last in place:
            del place[last]
        elif (number := _number(value, problem["type"])) is not None:
            place[last] = number
        else:
            continue
        changed = True
    return mended if changed else None


def _below(document: Any, steps: Iterable[int | str]) -> Any:
    """What stands at a place; None where nothing does: pydantic also names keys and choices as steps."""
    for step in steps:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return None
    return document


def _number(value: Any, problem: str) -> int | float | None:
    """The number that kubectl makes of a value that was refused; None where it makes no other one."""
    is_text = isinstance(value, str) and problem in NUMBER_MEANT and YAML_1_1_TEXT.fullmatch(value)
    if not is_text and not isinstance(value, float):
        return None
    number = float(value)
    if number.is_integer():
        return int(number)
    return number if is_text else None
