"""The operator and dlrmctl behind a proxy, as a user whose token an exec plugin gives and the API server revokes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_cli import app
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.connect_proxy import ConnectProxy
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
VERSION = "client.authentication.k8s.io/v1"


class RevocableToken:
    """A token of the operator's account that ends with the Secret it is bound to, and a plugin that prints the last."""

    def __init__(self, plane: ControlPlane, account: Identity, folder: Path) -> None:
        _, _, self._namespace, self._account = account.name.split(":")
        self._api, self._folder, self._number = plane.api, folder, 0
        self.plugin = folder / "plugin"
        self.plugin.write_text(f"#!/bin/sh\necho run >> {folder}/runs\ncat {folder}/credential\n")
        self.plugin.chmod(0o755)
        self.rotate()

    def rotate(self) -> None:
        """Give a new token, then revoke the last one."""
        secrets = f"/api/v1/namespaces/{self._namespace}/secrets"
        self._number += 1
        name = f"login-{self._number}"
        uid = self._api.call("POST", secrets, {"metadata": {"name": name}})["metadata"]["uid"]
        bound = {"apiVersion": "v1", "kind": "Secret", "name": name, "uid": uid}
        body = {"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"boundObjectRef": bound}}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{self._account}/token"
        token = self._api.call("POST", path, body)["status"]["token"]
        answer = {"kind": "ExecCredential", "apiVersion": VERSION, "status": {"token": token}}
        (self._folder / "credential").write_text(json.dumps(answer))
        if self._number > 1:
            self._api.call("DELETE", f"{secrets}/login-{self._number - 1}")

    def runs(self) -> int:
        return len((self._folder / "runs").read_text().splitlines())


def test_a_revoked_token_is_replaced_without_a_restart(
    api_types: ControlPlane,
    namespace: str,
    kubelet: KubeletDouble,
    account: Identity,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = RevocableToken(api_types, account, tmp_path)
    with ConnectProxy() as proxy:
        document: dict[str, Any] = yaml.safe_load(account.kubeconfig.read_text())
        document["clusters"][0]["cluster"]["proxy-url"] = proxy.url
        exec_plugin = {"apiVersion": VERSION, "command": token.plugin.name, "interactiveMode": "Never"}
        document["users"][0]["user"] = {"exec": {**exec_plugin, "command": f"./{token.plugin.name}"}}
        other = tmp_path / "other"
        other.write_text(yaml.safe_dump({"current-context": "it", "contexts": []}))
        kubeconfig = tmp_path / "exec.kubeconfig"
        kubeconfig.write_text(yaml.safe_dump({**document, "current-context": "gone"}))
        files = f"{other}:{kubeconfig}"
        with OperatorProcess(Path(files), namespace, tmp_path / "operator.log") as operator:
            operator.wait_ready()
            first = JobDriver(api_types.api, namespace, job_document("first"))
            first.until("Scheduling")

            token.rotate()
            proxy.cut()
            eventually(lambda: token.runs() == 2, 60, operator.log)
            second = JobDriver(api_types.api, namespace, job_document("second"))
            second.until("Scheduling")

            assert "restarting the operator loop" not in operator.log()
        code = app.main(["get", "--kubeconfig", files, "--context", "it"])

    assert code == 0
    assert {"first", "second"} <= set(capsys.readouterr().out.split())
    assert {target for target, _ in proxy.asked} == {api_types.server.removeprefix("https://")}
    assert token.runs() == 3
