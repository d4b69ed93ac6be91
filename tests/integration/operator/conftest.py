"""Fixtures of the operator's tests on a real control plane."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import STRICT, refuse
from dlrm_testing.charts.chart import Identity, refused, render, variant
from dlrm_testing.operator.definitions import install_crds, project_crd
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import Object, OperatorProcess, add_node

GANG_SCHEDULERS = [f"gangSchedulers.{gang}=true" for gang in ("kueue", "volcano", "coscheduling", "native")]
ANYWHERE = "namespace-of-the-test"
GATE = "--feature-gates=GenericWorkload=true"
KNOWS_GANGS = {
    "kube-apiserver": (*STRICT["kube-apiserver"], GATE, "--runtime-config=scheduling.k8s.io/v1beta1=true"),
    "kube-scheduler": (GATE,),
    "kube-controller-manager": (GATE,),
}
"""Flags with which Kubernetes 1.37 schedules gangs itself."""
CAPACITY = {"cpu": "64", "memory": "4Ti", "pods": "1000"}


@pytest.fixture(scope="session")
def api_types(control_plane: ControlPlane) -> ControlPlane:
    """A control plane that serves the project's CRDs and has two empty nodes."""
    _install_project(control_plane)
    for number in range(2):
        add_node(control_plane.api, f"operator-node-{number}", CAPACITY)
    return control_plane


@pytest.fixture(scope="module")
def native_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that serves the project's CRDs and schedules gangs itself; it has no nodes.

    It ends with its module: one that nobody uses takes processor time from other tests.
    """
    plane = ControlPlane(tmp_path_factory.mktemp("native-plane"), audit=True, extra_args=KNOWS_GANGS)
    try:
        plane.start()
    except MissingToolError as error:
        refuse(error)
    with plane:
        _install_project(plane)
        yield plane


def _install_project(control_plane: ControlPlane) -> None:
    install_crds(control_plane.api, project_crd("dlrmjobs"), project_crd("hardwareprofiles"))


@pytest.fixture
def kubelet(api_types: ControlPlane, namespace: str) -> Iterator[KubeletDouble]:
    """A kubelet of the test's namespace."""
    with KubeletDouble(api_types.api, namespace) as kubelet:
        yield kubelet


@pytest.fixture(scope="session")
def chart_of(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Object]]:
    """The chart's objects for an operator of ``scope`` (namespace, cluster) that is installed in a namespace."""
    home = tmp_path_factory.mktemp("helm")

    @cache
    def rendered(scope: str) -> str:
        values = variant("namespaced") if scope == "namespace" else "webhook.enabled=false"
        return json.dumps(render(helm, home, "demo", ANYWHERE, values, *GANG_SCHEDULERS))

    return lambda scope, namespace: list(json.loads(rendered(scope).replace(ANYWHERE, namespace)))


@pytest.fixture
def account(
    api_types: ControlPlane, namespace: str, chart_of: Callable[[str, str], list[Object]], tmp_path: Path
) -> Iterator[Identity]:
    """The service account that the chart makes for an operator of the test's namespace; it lacks no right."""
    with Identity(api_types, chart_of("namespace", namespace), tmp_path) as found:
        yield found
        assert refused(found) == []


@pytest.fixture
def cluster_account(
    api_types: ControlPlane, namespace: str, chart_of: Callable[[str, str], list[Object]], tmp_path: Path
) -> Iterator[Identity]:
    """The service account that the chart makes for an operator of all namespaces; it lacks no right."""
    with Identity(api_types, chart_of("cluster", namespace), tmp_path) as found:
        yield found
        assert refused(found) == []


@pytest.fixture
def operator(account: Identity, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """A running operator of the test's namespace, with exactly the chart's rights."""
    with OperatorProcess(account.kubeconfig, namespace, tmp_path / "operator.log") as process:
        yield process
    print(process.log())
