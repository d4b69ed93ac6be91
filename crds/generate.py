"""Writes what is made from the models of ``dlrm_api``: the definitions, the chart's equal copies, and the reference.

``python crds/generate.py`` writes them; with ``--check`` it writes nothing and fails where a file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from dlrm_api.crd import definitions
from dlrm_api.reference import reference

HEADER = "# Generated from crds/dlrm_api by make generate: change the models, not this file.\n"
FOLDER = Path(__file__).resolve().parent
CHART = FOLDER.parent / "charts" / "dlrm-operator" / "files" / "crds"


def rendered() -> dict[Path, str]:
    """Every file's path and text; equal models give equal bytes."""
    texts = {f"{plural}.yaml": HEADER + _yaml(document) for plural, document in definitions().items()}
    files = {folder / name: text for folder in (FOLDER, CHART) for name, text in texts.items()}
    return {**files, FOLDER / "API.md": reference()}


def _yaml(document: object) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes a value out each time it occurs: kubectl reads anchors, but people and Helm's tools stumble."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the base class names it so
        return True


def main() -> int:
    """Write or check the files; 1 where a checked file differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file differs")
    check = parser.parse_args().check
    stale = [path for path, text in rendered().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"{path} is not what the models give: run make generate", file=sys.stderr)
        else:
            path.write_text(rendered()[path], "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
