"""Kinds that a test's control plane serves beside Kubernetes' own, whoever of the session's tests asked first."""

from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.api import Api
from dlrm_testing.operator.operator_cluster import eventually

Object = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OWN = Path(__file__).resolve().parents[4] / "crds"
POD_GROUPS = Path(__file__).with_name("crds")


def own(plural: str) -> Object:
    """The definition of one of the project's kinds."""
    return _read(OWN / f"{plural}.yaml")


def pod_groups(gang: str) -> Object:
    """The definition that a gang scheduler (``volcano``, ``coscheduling``) brings for its groups of pods."""
    return _read(POD_GROUPS / f"{gang}.yaml")


def served(definition: Object) -> str:
    """Where a kind's objects are listed, in all namespaces."""
    spec = definition["spec"]
    version = next(each["name"] for each in spec["versions"] if each["served"])
    return f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"


def path_of(definition: Object) -> str:
    """Where the definition itself is."""
    return f"{DEFINITIONS}/{definition['metadata']['name']}"


def define(api: Api, *definitions: Object) -> None:
    """Have kinds served; a definition that is there already stays as it is."""
    for definition in definitions:
        api.ensure(DEFINITIONS, definition)
    eventually(lambda: all(api.found(served(definition)) for definition in definitions))


def withdraw(api: Api, definition: Object) -> None:
    """Have a kind served no more, and all its objects gone with it."""
    path = path_of(definition)
    if api.found(path):
        api.call("DELETE", path)
    eventually(lambda: not api.found(path))


def _read(path: Path) -> Object:
    found: Object = yaml.safe_load(path.read_text())
    return found
