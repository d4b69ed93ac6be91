"""A folder of certificate and key as the kubelet mounts a Secret: one link leads to all, and is swapped at once."""

import itertools
import shutil
from pathlib import Path

from dlrm_cluster.certificates import Certificates, write_certificates


class MountedSecret:
    """``tls.crt`` and ``tls.key`` in ``folder``, signed by an authority that is new at each rotation."""

    def __init__(self, folder: Path, hosts: tuple[str, ...] = ("127.0.0.1", "localhost")) -> None:
        self.folder = folder
        self._hosts = hosts
        self._numbers = itertools.count()
        folder.mkdir()
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(Path("..data") / name)
        self.ca = self.rotate()

    def rotate(self) -> Path:
        """Put a new pair there; the authority that signed it."""
        made = self.make()
        self.show(made.server_cert, made.server_key)
        self.ca = made.ca
        return made.ca

    def mismatch(self) -> None:
        """Mount a certificate that does not match its key."""
        self.show(self.make().server_cert, self.make().server_key)

    def make(self) -> Certificates:
        """Create a new CA and certificates, without mounting them."""
        scratch = self.folder.parent / f"{self.folder.name}-made-{next(self._numbers)}"
        scratch.mkdir()
        return write_certificates(scratch, self._hosts)

    def show(self, certificate: Path, key: Path) -> None:
        """Swap the pair in."""
        version = self.folder / f"..version-{next(self._numbers)}"
        version.mkdir()
        shutil.copy(certificate, version / "tls.crt")
        shutil.copy(key, version / "tls.key")
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self.folder / "..data")
