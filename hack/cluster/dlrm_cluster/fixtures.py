"""pytest fixtures over the real servers; ``tests/conftest.py`` loads them as a plugin.

Under pytest-xdist each worker is a session and starts a control plane of its own (about 4 s and 500 MB).
A machine that cannot have the servers skips loudly, and fails where the environment says ``CI``.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from dlrm_cluster.build import OLDEST_KUBERNETES, binaries
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import ClusterError, MissingToolError
from dlrm_cluster.real_cluster import RealCluster, cluster_for_tests
from dlrm_cluster.s3 import RcloneS3, S3Server, VersityGateway

STRICT = {"kube-apiserver": ("--enable-admission-plugins=OwnerReferencesPermissionEnforcement",)}
"""What some distributions turn on beside Kubernetes' own choice: it asks for rights that no request shows."""
KUBERNETES = os.environ.get("TEST_KUBERNETES", "kubernetes")
"""Recipe of the session's control plane. On the oldest tested version only tests marked ``oldest_server`` run."""
NEEDED = {
    "control_plane": ("etcd", KUBERNETES),
    "helm": ("helm",),
    "kueue": ("kueue", "kueue-0.10"),
    "kwok": ("kwok",),
    "real_cluster": ("etcd", OLDEST_KUBERNETES, "node", "coredns"),
    "versitygw": ("versitygw",),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what does not run on the session's version of Kubernetes."""
    left_out = [item for item in items if not _runs_on_this_version(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _runs_on_this_version(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("oldest_server")
    if KUBERNETES == OLDEST_KUBERNETES:
        return mark is not None
    return mark is None or not mark.kwargs.get("only")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the collected tests need before the first of them, whose time limit a build would exceed."""
    if session.config.option.collectonly:
        return
    wanted = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    for fixture, recipes in NEEDED.items():
        if fixture in wanted:
            _build_ahead(recipes)


def _build_ahead(recipes: tuple[str, ...]) -> None:
    for recipe in recipes:
        try:
            binaries(recipe)
        except ClusterError:
            return  # the fixture meets it again, where pytest reports it at the tests that it concerns


def refuse(reason: MissingToolError) -> NoReturn:
    """Skip the test, saying what to install; in CI nothing may be skipped, so there it fails."""
    if os.environ.get("CI"):
        pytest.fail(str(reason))
    pytest.skip(str(reason))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Return a running control plane with an audit log, shared by the session's tests; use a ``namespace`` of it."""
    folder = tmp_path_factory.mktemp("control-plane")
    plane = ControlPlane(folder, kubernetes=KUBERNETES, audit=True, extra_args=STRICT)
    try:
        plane.start()
    except MissingToolError as error:
        refuse(error)
    with plane:
        yield plane


@pytest.fixture(scope="session")
def real_cluster() -> Iterator[RealCluster]:
    """Return a cluster whose pods run: that of ``KUBECONFIG``, or one with a node on this machine (root)."""
    try:
        with cluster_for_tests() as cluster:
            yield cluster
    except MissingToolError as error:
        refuse(error)


@pytest.fixture(scope="session")
def real_node(real_cluster: RealCluster) -> RealCluster:
    """Return the real cluster if its node's processes are within reach: one made by ``up --node``."""
    try:
        real_cluster.own_folder()
    except MissingToolError as error:
        refuse(error)
    return real_cluster


@pytest.fixture
def real_namespace(real_cluster: RealCluster) -> Iterator[str]:
    """Create a namespace in the real cluster; delete it afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    real_cluster.kubectl("create", "namespace", name)
    account = ("serviceaccount", "default", f"--namespace={name}")
    real_cluster.eventually(lambda: real_cluster.get(*account), 30, "the default service account")
    yield name
    real_cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def helm() -> Path:
    """Return the path of helm. It does not know the cluster's version: pass ``--kube-version``."""
    try:
        return binaries("helm") / "helm"
    except MissingToolError as error:
        refuse(error)


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Create a namespace in which pods can be created; delete it afterwards."""
    name = f"test-{secrets.token_hex(4)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    control_plane.api.call("POST", "/api/v1/namespaces", body)
    path = f"/api/v1/namespaces/{name}"
    control_plane.wait_for(f"{path}/serviceaccounts/default", "kube-controller-manager")
    yield name
    control_plane.api.call("DELETE", path)
    # No kubelet confirms that a bound pod ended, so its grace period would keep the namespace for ever.
    control_plane.api.call("DELETE", f"{path}/pods", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})


@pytest.fixture
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield an empty S3 server that honours ``If-None-Match``."""
    yield from _serve(VersityGateway(tmp_path_factory.mktemp("versitygw")))


@pytest.fixture
def rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Yield an empty S3 server that ignores ``If-None-Match``, as some stores do."""
    yield from _serve(RcloneS3(tmp_path_factory.mktemp("rclone")))


def _serve(server: S3Server) -> Iterator[S3Server]:
    try:
        server.start()
    except MissingToolError as error:
        refuse(error)
    with server:
        yield server
    shutil.rmtree(server.root)  # pytest keeps old folders; object data is too large for that
