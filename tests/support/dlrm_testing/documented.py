"""Commands in the docs: the lines of their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOT_OURS = {".venv", "node_modules", ".state", "runs"}
"""Folders of others' documents: ``.state`` has file systems of containers, ``runs`` worktrees of commits."""
DOCS = tuple(sorted(path for path in ROOT.rglob("*.md") if not NOT_OURS & set(path.relative_to(ROOT).parts)))
FENCED = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(doc: Path) -> list[list[str]]:
    """Return the lines of each block of shell commands, with continued lines joined."""
    found = FENCED.findall(doc.read_text())
    return [[line for line in block.replace("\\\n", " ").splitlines() if line.strip()] for block in found]
