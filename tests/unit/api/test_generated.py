"""Generated files match the models, and rewrites to structural schemas keep their meaning."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hack import generate
from pydantic import Field

from dlrm_api.base import ApiModel, Rule
from dlrm_api.crd import definitions
from dlrm_api.reference import reference
from dlrm_api.structural import messages, structural

CRDS = Path(__file__).parents[3] / "crds"


class Inner(ApiModel):
    """Inner words."""

    size: int = Field(1, ge=1, le=9, description="Size.")


class Outer(ApiModel):
    """Outer words."""

    inner: Inner = Field(Inner(), description="Field words.")
    maybe: Inner | None = Field(None, description="Maybe.")
    sized: Inner = Field(Inner(size=3), description="Other default.")
    many: tuple[Inner, ...] = Field((), max_length=3, description="Many.")
    named: dict[str, int] = Field({}, max_length=3, description="Named.")
    mixed: Literal["auto", 2, 8] = Field(8, description="Mixed.")
    flag: bool = Field(False, description="Flag.")
    fixed: Literal["a"] = Field("a", description="Fixed.")

    rules = (Rule(cel="self.inner.size > 0", holds=lambda outer: outer.inner.size > 0, message="inner must be big"),)


def rewritten(model: type[ApiModel]) -> dict[str, Any]:
    raw = model.model_json_schema(by_alias=True)
    return structural(raw, raw.get("$defs", {}))


def test_generated_files_are_up_to_date() -> None:
    for path, text in generate.render().items():
        assert path.read_text("utf-8") == text, f"{path.name} is stale: run make generate"


@pytest.mark.slow
def test_the_text_is_yaml_of_the_definition_with_a_header() -> None:
    found = {path.stem: text for path, text in generate.render().items() if path.parent == generate.CRDS}

    assert {name: yaml.safe_load(text) for name, text in found.items()} == definitions()
    assert all(text.startswith("# Generated from crds/dlrm_api by make generate") for text in found.values())


def fields_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield name, field
        yield from fields_of(field)
    for below in ("items", "additionalProperties"):
        if isinstance(schema.get(below), dict):
            yield from fields_of(schema[below])


def test_reference_lists_every_field_and_its_links_resolve() -> None:
    text = reference()
    rows = {(name, words) for name, words in re.findall(r"^\| \**`(\w+)`\** \|.*\| ([^|]*) \|$", text, re.MULTILINE)}
    titles = [line[4:].lower() for line in text.splitlines() if line.startswith("### ")]
    anchors = [re.sub(r"[^a-z0-9 -]", "", title).replace(" ", "-") for title in titles]

    for definition in definitions().values():
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
        for part in ("spec", "status"):
            for name, field in fields_of(schema.get(part, {})):
                assert (name, field["description"]) in rows
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\(#([^)]*)\)", text)) <= set(anchors)


@pytest.mark.parametrize(
    "row",
    [
        "| **`rows`** | integer |  | 1 to 2^40 |",
        "| `maxRestarts` | integer | `10` | 0 to 10,000 |",
        '| `pooling` | `sum`, `mean` | `"sum"` |  |',
        "| `bits` | `auto`, `2`, `3`, `4`, `8`, `16`, `32` | `32` |  |",
        '| `backoff` | duration | `"10s"` |  |',
        "| `denseFeatures` | list of text |  | at most 10,000 entries; 1 to 128 characters |",
    ],
)
def test_the_reference_tells_types_defaults_and_bounds(row: str) -> None:
    assert f"\n{row} " in reference()


@pytest.mark.slow
def test_a_stale_file_fails_the_check_and_is_rewritten_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crd = tmp_path / "dlrmjobs.yaml"
    current = {tmp_path / path.name: text for path, text in generate.render().items()}
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "render", lambda: current)
    for path, text in current.items():
        path.write_text(text)
    crd.write_text("kind: Other\n")

    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert crd.read_text() == "kind: Other\n"
    assert capsys.readouterr().err.startswith("dlrmjobs.yaml ")

    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0


def test_a_nested_model_is_written_out_with_the_field_s_own_words() -> None:
    inner = rewritten(Outer)["properties"]["inner"]

    assert inner["description"] == "Field words."
    assert inner["properties"]["size"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "default": 1,
        "description": "Size. Default: 1.",
    }
    assert "additionalProperties" not in inner


def test_an_optional_field_is_plain_and_not_required() -> None:
    schema = rewritten(Outer)

    assert schema["properties"]["maybe"]["type"] == "object"
    assert "anyOf" not in schema["properties"]["maybe"]
    assert "default" not in schema["properties"]["maybe"]
    assert "required" not in schema


def test_a_default_holds_only_what_the_inner_defaults_do_not_say() -> None:
    fields = rewritten(Outer)["properties"]

    assert fields["inner"]["default"] == {}
    assert fields["sized"]["default"] == {"size": 3}
    assert "default" not in fields["many"]
    assert "default" not in fields["named"]


def test_lists_are_atomic_and_maps_keep_their_bound() -> None:
    fields = rewritten(Outer)["properties"]

    assert fields["many"]["x-kubernetes-list-type"] == "atomic"
    assert fields["named"]["maxProperties"] == 3
    assert fields["named"]["additionalProperties"] == {"type": "integer"}


def test_an_enum_of_two_types_becomes_an_int_or_string_with_a_rule() -> None:
    mixed = rewritten(Outer)["properties"]["mixed"]

    assert mixed["x-kubernetes-int-or-string"] is True
    assert mixed["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert mixed["x-kubernetes-validations"] == [
        {"rule": "self == 'auto' || self == 2 || self == 8", "message": "use one of auto, 2, 8"}
    ]
    assert "enum" not in mixed


def test_a_lone_word_becomes_an_enum() -> None:
    assert rewritten(Outer)["properties"]["fixed"]["enum"] == ["a"]


def test_rules_of_a_class_become_cel() -> None:
    rules = rewritten(Outer)["x-kubernetes-validations"]

    assert rules == [{"rule": "self.inner.size > 0", "message": "inner must be big"}]


class Pair(ApiModel):
    """Two rules."""

    low: int = Field(0, ge=0, le=9, description="Low.")
    high: int = Field(9, ge=0, le=9, description="High.")

    rules = (
        Rule(cel="self.low > 0", holds=lambda pair: pair.low > 0, message='low is 0: give "low"'),
        Rule(cel="self.high > self.low || self.low == 9", holds=lambda pair: True, message="high is 'low'"),
    )


def test_rules_of_a_class_become_one_that_reports_the_first_broken() -> None:
    (rule,) = rewritten(Pair)["x-kubernetes-validations"]

    assert rule == {
        "rule": "(self.low > 0) && (self.high > self.low || self.low == 9)",
        "messageExpression": r'''!(self.low > 0) ? "low is 0: give \"low\"" : "high is 'low'"''',
    }
    assert messages(rule) == ['low is 0: give "low"', "high is 'low'"]


@pytest.mark.parametrize(
    "schema", [{"type": "integer", "exclusiveMinimum": 0}, {"type": "array", "prefixItems": [{"type": "integer"}]}]
)
def test_a_keyword_without_a_structural_form_is_refused_when_generating(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no structural form for '(exclusiveMinimum|prefixItems)'"):
        structural(schema, {})


def test_no_definition_holds_what_a_structural_schema_may_not() -> None:
    forbidden = {"$ref", "$defs", "title", "const", "exclusiveMinimum", "exclusiveMaximum", "x-dlrm-not-built"}

    def keys(node: Any) -> set[str]:
        if isinstance(node, dict):
            below = [keys(value) for name, value in node.items() if name != "properties"]
            below += [keys(field) for field in node.get("properties", {}).values()]
            return set(node).union(*below)
        return set().union(*(keys(value) for value in node)) if isinstance(node, list) else set()

    for definition in definitions().values():
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        assert not keys(schema) & forbidden
