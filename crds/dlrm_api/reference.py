"""Render the API reference as Markdown from the CRDs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dlrm_api.base import RULES
from dlrm_api.crd import definitions
from dlrm_api.structural import Schema, messages

HEAD = """# API reference

Generated from `crds/dlrm_api` by `make generate`: change the models, not this file. Fields in bold are required. A
duration is whole numbers with units, largest first (`1d12h`, `90s`); a quantity is bytes as a number or with a unit
(`512Mi`, `1.5Gi`, `2G`). The rules below a table are enforced by the API server and by `dlrmctl validate`.
"""
CHOICE = "use one of "
"""Prefix of the message of a mixed enum's rule (see ``structural``)."""
WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "object"}


def reference() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for each in definitions().values() for line in _kind(each["spec"]))]).rstrip() + "\n"


def _kind(spec: Mapping[str, Any]) -> Iterator[str]:
    version = spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    names = spec["names"]
    yield f"## {names['kind']}\n"
    scope = "of the whole cluster" if spec["scope"] == "Cluster" else "of a namespace"
    group, short = f"{spec['group']}/{version['name']}", names["shortNames"][0]
    yield f"{schema['description']} `{group}`, {scope}; `kubectl get {short}`.\n"
    seen: dict[str, str] = {}
    for part in ("spec", "status"):
        if part in schema["properties"]:
            yield from _object(part, schema["properties"][part], names["kind"], seen)
    yield from _rules(schema)


def _object(path: str, schema: Schema, kind: str, seen: dict[str, str]) -> Iterator[str]:
    # ``seen`` maps each object's fields to the path of the table that lists them.
    form = json.dumps(schema["properties"], sort_keys=True)
    yield f"### {kind}: `{path}`\n"
    if form in seen:
        yield f"{schema.get('description', '')} Its fields are those of {_link(seen[form], kind)}.\n"
        return
    seen[form] = path
    yield f"{schema.get('description', '')}\n"
    yield "| field | type | default | bounds | meaning |\n| --- | --- | --- | --- | --- |"
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        shown = f"**`{name}`**" if name in required else f"`{name}`"
        kind_of, meaning = _type(f"{path}.{name}", field, kind), field.get("description", "")
        cells = (shown, kind_of, _default(field), _bounds(field), meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    yield from _rules(schema)
    for name, field in schema["properties"].items():
        inner, mark = _inner(field)
        if "properties" in inner:
            yield from _object(f"{path}.{name}{mark}", inner, kind, seen)


def _rules(schema: Schema) -> Iterator[str]:
    found = list(dict.fromkeys(message for rule in schema.get(RULES, ()) for message in messages(rule)))
    yield from (f"- {message}." for message in found)
    if found:
        yield ""


def _inner(field: Schema) -> tuple[Schema, str]:
    if "items" in field:
        return field["items"], "[]"
    if isinstance(field.get("additionalProperties"), dict):
        return field["additionalProperties"], "{}"
    return field, ""


def _type(path: str, field: Schema, kind: str) -> str:
    inner, mark = _inner(field)
    before = {"[]": "list of ", "{}": "map of "}.get(mark, "")
    return before + (_link(path + mark, kind) if "properties" in inner else _word(inner))


def _word(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    pattern = str(field.get("pattern", ""))
    if "Ki|Mi" in pattern:
        return "quantity"
    if "+d)?" in pattern:
        return "duration"
    if field.get("format") == "date-time":
        return "time"
    # Only a rule can list an enum that mixes strings and numbers.
    if RULES in field and "x-kubernetes-int-or-string" in field:
        return ", ".join(f"`{value}`" for value in field[RULES][0]["message"].removeprefix(CHOICE).split(", "))
    return WORDS.get(field.get("type", ""), "anything")


def _default(field: Schema) -> str:
    # An object's default is that of its fields.
    return "" if "default" not in field or "properties" in field else f"`{json.dumps(field['default'])}`"


def _bounds(field: Schema) -> str:
    inner, mark = _inner(field)
    parts = list(_limits(field)) if mark else []
    if "properties" not in inner:
        parts += _limits(inner)
    return "; ".join(parts)


def _limits(field: Schema) -> Iterator[str]:
    for low, high, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " entries"),
        ("minProperties", "maxProperties", " entries"),
    ):
        minimum, maximum = field.get(low), field.get(high)
        if unit == " characters" and _word(field) in ("duration", "quantity", "time"):
            continue
        if minimum is not None and maximum is not None:
            yield f"{_number(minimum)} to {_number(maximum)}{unit}"
        elif maximum is not None:
            yield f"at most {_number(maximum)}{unit}"
        elif minimum is not None:
            yield f"at least {_number(minimum)}{unit}"
    if "multipleOf" in field:
        yield f"a multiple of {field['multipleOf']}"
    if "pattern" in field and _word(field) == "text":
        yield f"`{field['pattern']}`"


def _number(value: float) -> str:
    if abs(value) < 1e7:
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if value > 0 and value == int(value) and int(value) & (int(value) - 1) == 0:
        return f"2^{int(value).bit_length() - 1}"
    return f"{value:g}"


def _link(path: str, kind: str) -> str:
    anchor = re.sub(r"[^a-z0-9 -]", "", f"{kind}: {path}".lower()).replace(" ", "-")
    return f"[`{path}`](#{anchor})"
