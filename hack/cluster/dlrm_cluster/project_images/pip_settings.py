"""Where pip finds packages on this machine, handed to builds as secrets so that no layer holds it."""

import os
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path

KEPT = ("index-url", "extra-index-url", "no-index", "trusted-host", "proxy", "timeout", "retries", "client-cert")
"""Settings that say how to reach an index; others are this machine's affair."""


def write_secrets(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """Write pip's settings and certificate authorities into ``folder``; returns secrets' files by their names.

    The settings are those of pip's files and of ``PIP_…``, which win. ``hack/images/pip`` reads them in the build.
    """
    parser = ConfigParser(interpolation=None)
    home = Path(environment.get("HOME", "/"))
    named = [Path(environment["PIP_CONFIG_FILE"])] if environment.get("PIP_CONFIG_FILE") else []
    parser.read([Path("/etc/pip.conf"), home / ".pip/pip.conf", home / ".config/pip/pip.conf", *named])
    found = {**_section(parser, "global"), **_section(parser, "install")}
    for name in (*KEPT, "cert"):
        if value := environment.get(f"PIP_{name.replace('-', '_').upper()}"):
            found[name] = value
    secrets = {"pip": folder / "pip"}
    lines = [f"{name} = {' '.join(found[name].split())}" for name in KEPT if found.get(name)]
    secrets["pip"].write_text("\n".join(["[global]", *lines, ""]))
    if cert := found.get("cert"):
        secrets["ca"] = folder / "ca"
        secrets["ca"].write_bytes(Path(cert).read_bytes())
    return secrets


def _section(parser: ConfigParser, name: str) -> dict[str, str]:
    return dict(parser[name]) if parser.has_section(name) else {}
