"""Install and delete CRDs on a test's control plane. Tests of one session may ask for them in any order."""

from pathlib import Path
from typing import Any

import yaml

from dlrm_cluster.api import Api
from dlrm_testing.operator.operator_cluster import eventually

Object = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
OWN = Path(__file__).resolve().parents[4] / "crds"
POD_GROUPS = Path(__file__).with_name("crds")


def project_crd(plural: str) -> Object:
    """The definition of one of the project's kinds."""
    return _read(OWN / f"{plural}.yaml")


def pod_group_crd(gang: str) -> Object:
    """The definition that a gang scheduler (``volcano``, ``coscheduling``) brings for its groups of pods."""
    return _read(POD_GROUPS / f"{gang}.yaml")


def list_path(definition: Object) -> str:
    """Where a kind's objects are listed, in all namespaces."""
    spec = definition["spec"]
    version = next(each["name"] for each in spec["versions"] if each["served"])
    return f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"


def crd_path(definition: Object) -> str:
    """Where the definition itself is."""
    return f"{DEFINITIONS}/{definition['metadata']['name']}"


def install_crds(api: Api, *definitions: Object) -> None:
    """Have kinds served; a definition that is there already stays as it is."""
    for definition in definitions:
        api.ensure(DEFINITIONS, definition)
    eventually(lambda: all(api.found(list_path(definition)) for definition in definitions))


def delete_crd(api: Api, definition: Object) -> None:
    """Have a kind served no more, and all its objects gone with it."""
    path = crd_path(definition)
    if api.found(path):
        api.call("DELETE", path)
    eventually(lambda: not api.found(path))


def _read(path: Path) -> Object:
    found: Object = yaml.safe_load(path.read_text())
    return found
