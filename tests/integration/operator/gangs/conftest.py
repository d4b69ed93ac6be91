"""Tests of gangs run on a control plane that schedules gangs itself; other schedulers and Kueue run beside it."""

import pytest

from dlrm_cluster.control_plane import ControlPlane


@pytest.fixture(scope="module")
def control_plane(native_plane: ControlPlane) -> ControlPlane:
    """A control plane of Kubernetes 1.37 with its gang scheduling."""
    return native_plane


@pytest.fixture(scope="module")
def api_types(native_plane: ControlPlane) -> ControlPlane:
    """The same control plane."""
    return native_plane
