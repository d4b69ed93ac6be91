"""What machines lack: file locks, a UTF-8 locale."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_api.errors import DeviceError
from dlrm_cli.run.workdir import locked


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with (
        pytest.raises(DeviceError, match=f"the file system of {tmp_path} has no file locks"),
        locked(tmp_path, 1.0, print, lambda: False),
    ):
        pass


@pytest.mark.slow
def test_a_locale_that_is_not_utf8_reads_and_names_what_is(tmp_path: Path) -> None:
    manifest = tmp_path / "jöb.yaml"
    manifest.write_text(
        "kind: DLRMJob # träining\napiVersion: dlrm.dev/v1alpha1\nmetadata: {name: ünsuitable}\n", "utf-8"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    done = subprocess.run(
        [sys.executable, "-m", "dlrm_cli", "validate", str(manifest)], env=environment, capture_output=True, check=False
    )

    assert done.returncode == 78
    assert b"j\\xf6b.yaml" in done.stderr
    assert b"this is a bug" not in done.stderr
