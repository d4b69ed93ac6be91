"""Image archives of a few files, written without any tool for images."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

PLATFORM = {"aarch64": "arm64", "x86_64": "amd64"}


def write_image(archive: Path, name: str, files: Mapping[str, Path], command: Sequence[str]) -> Path:
    """Write the image ``name`` with one layer that holds ``files`` (path in the image -> program here).

    ``name`` is whole, such as ``dlrm.local/pause:1``. The archive has Docker's form, which keeps it as it is.
    """
    layer = _tar({path: source.read_bytes() for path, source in files.items()}, mode=0o755)
    config = {
        "architecture": PLATFORM[os.uname().machine],
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    content = {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer,
    }
    archive.write_bytes(_tar(content, mode=0o644))
    return archive


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    """Pack an image; equal files give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
