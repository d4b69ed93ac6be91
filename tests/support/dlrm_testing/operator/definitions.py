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
    """Return the CRD of one of the project's kinds."""
    return _read(OWN / f"{plural}.yaml")


def pod_group_crd(gang: str) -> Object:
    """Return the CRD that a gang scheduler (``volcano``, ``coscheduling``) installs for its pod groups."""
    return _read(POD_GROUPS / f"{gang}.yaml")


def list_path(definition: Object) -> str:
    """Return the path that lists a kind's objects in all namespaces."""
    spec = definition["spec"]
    version = next(each["name"] for each in spec["versions"] if each["served"])
    return f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"


def crd_path(definition: Object) -> str:
    """Return the path of the CRD itself."""
    return f"{DEFINITIONS}/{definition['metadata']['name']}"


def install_crds(api: Api, *definitions: Object) -> None:
    """Create missing CRDs and wait until all of them are served."""
    for definition in definitions:
        api.ensure(DEFINITIONS, definition)
    eventually(lambda: all(api.found(list_path(definition)) for definition in definitions))


def delete_crd(api: Api, definition: Object) -> None:
    """Delete a CRD and, with it, all objects of its kind."""
    path = crd_path(definition)
    if api.found(path):
        api.call("DELETE", path)
    eventually(lambda: not api.found(path))


def _read(path: Path) -> Object:
    found: Object = yaml.safe_load(path.read_text())
    return found
