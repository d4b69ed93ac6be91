"""A machine without Go skips loudly; CI fails instead."""

import pytest

from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import refuse

REASON = MissingToolError("install Go")


def test_a_user_without_go_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match="install Go"):
        refuse(REASON)


def test_ci_without_go_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match="install Go"):
        refuse(REASON)
