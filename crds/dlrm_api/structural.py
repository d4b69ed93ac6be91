"""Rewrite pydantic's JSON schema to a structural schema, the only kind that a CRD may hold.

pydantic expresses nested models by reference, optional fields as a union with null, and closed objects by
``additionalProperties: false``; the API server rejects all three. Unknown keywords are an error here, so that a new
kind of field fails at generation and not in a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dlrm_api.base import RULES
from dlrm_api.fields import INT_OR_STRING

Schema = dict[str, Any]

KEPT = frozenset({
    "description", "type", "format", "enum", "default", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties", "required", RULES,
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
})  # fmt: skip
"""Keywords that pass unchanged."""
DROPPED = frozenset({"title", "$defs"})


def structural(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Rewrite a schema recursively; ``definitions`` are the targets of its references.

    Raises:
        ValueError: a keyword has no structural form.
    """
    flat = _resolved(schema, definitions)
    result: Schema = {}
    for keyword, value in flat.items():
        if keyword == "properties":
            result["properties"] = {name: structural(field, definitions) for name, field in value.items()}
        elif keyword == "items":
            result["items"] = structural(value, definitions)
            result.setdefault("x-kubernetes-list-type", "atomic")
        elif keyword == "additionalProperties":
            if value is not False:
                result["additionalProperties"] = structural(value, definitions)
        elif keyword == "const":
            result["enum"] = [value]
        elif keyword == "anyOf" and flat.get("x-kubernetes-int-or-string"):
            result["anyOf"] = value
        elif keyword in KEPT:
            result[keyword] = value
        elif keyword not in DROPPED:
            raise ValueError(f"no structural form for {keyword!r} in {dict(flat)}")
    _one_rule(result)
    _mixed_enum(result)
    _small_default(result)
    _named_default(result)
    return result


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    # Keywords next to a reference win over those of its target.
    flat = dict(schema)
    while True:
        if "$ref" in flat:
            target = definitions[flat.pop("$ref").rsplit("/", 1)[-1]]
        elif len(choices := [one for one in flat.get("anyOf", ()) if one.get("type") != "null"]) == 1:
            del flat["anyOf"]
            target = choices[0]
        else:
            return flat
        flat = {**target, **flat}


def _one_rule(schema: Schema) -> None:
    # Each rule has a fixed cost at every write of the object or its status, so several become one, which reports the
    # message of the first broken one.
    rules = schema.get(RULES, ())
    if len(rules) < 2:
        return
    *first, last = rules
    said = "".join(f"!({rule['rule']}) ? {json.dumps(rule['message'])} : " for rule in first)
    joined = " && ".join(f"({rule['rule']})" for rule in rules)
    schema[RULES] = [{"rule": joined, "messageExpression": said + json.dumps(last["message"])}]


def messages(rule: Mapping[str, Any]) -> list[str]:
    """Return every message that a rule can produce."""
    if "message" in rule:
        return [rule["message"]]
    return [json.loads(text) for text in re.findall(r'"(?:[^"\\]|\\.)*"', rule["messageExpression"])]


def _mixed_enum(schema: Schema) -> None:
    """Replace an enum of strings and numbers, which has no type, by an int-or-string with a rule."""
    values = schema.get("enum", ())
    if len({isinstance(value, str) for value in values}) < 2:
        return
    del schema["enum"]
    schema.pop("type", None)
    schema.update(INT_OR_STRING)
    rule = " || ".join(f"self == {_literal(value)}" for value in values)
    schema[RULES] = [{"rule": rule, "message": "use one of " + ", ".join(str(value) for value in values)}]


def _small_default(schema: Schema) -> None:
    # Drop what the defaults of the fields repeat, and empty defaults: absent and empty mean the same.
    if "default" not in schema:
        return
    default = _without_inner_defaults(schema["default"], schema)
    fills = any("default" in field for field in schema.get("properties", {}).values())
    if default is None or (default in ([], {}) and not fills):
        del schema["default"]
    else:
        schema["default"] = default


def _named_default(schema: Schema) -> None:
    # kubectl explain shows descriptions and no defaults.
    default, words = schema.get("default"), schema.get("description", "")
    if len(schema.get("enum", ())) == 1 or "default" in words.lower():
        return
    if isinstance(default, str | int | float) and words:
        shown = str(default).lower() if isinstance(default, bool) else default
        schema["description"] = f"{words} Default: {shown}."


def _without_inner_defaults(value: Any, schema: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields = schema["properties"]
    inner = {name: _without_inner_defaults(item, fields[name]) for name, item in value.items()}
    return {
        name: item for name, item in inner.items() if item not in (None, [], {}) and item != fields[name].get("default")
    }


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)
