"""The commands of ``python -m dlrm_cluster``; results go to stdout, progress and errors to stderr."""

import argparse
import shlex
import sys
from pathlib import Path

from dlrm_cluster import lifecycle
from dlrm_cluster.build import RECIPES, binaries
from dlrm_cluster.errors import ClusterError


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 on success, 1 when it failed, or for ``status`` when not all servers run."""
    arguments = _parser().parse_args(argv)
    try:
        match arguments.command:
            case "build":
                return _build(arguments.names)
            case "up":
                return _up(arguments.dir, arguments.node)
            case "kubelet":
                return _kubelet(arguments.dir, arguments.what)
            case "load":
                return _load(arguments.dir, arguments.archives)
            case "down":
                return _down(arguments.dir)
            case _:
                return _status(arguments.dir)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dlrm_cluster", description="A real Kubernetes for tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build the servers into the cache")
    known = ", ".join(RECIPES)
    build.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which of {known}; those that tests need when none is named"
    )
    helps = {
        "up": "start a cluster that keeps running, and print how to reach it",
        "kubelet": "stop the real node's kubelet, as an outage does, or start it again",
        "load": "give the real node images that were built here",
        "down": "end it",
        "status": "say what runs",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--dir", type=Path, default=lifecycle.DEFAULT_FOLDER, help="its folder (%(default)s)")
        if name == "up":
            command.add_argument("--node", action="store_true", help="with a real node, on which pods run; needs root")
        if name == "kubelet":
            command.add_argument("what", choices=("stop", "start"))
        if name == "load":
            command.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE", help="OCI or Docker archive")
    return parser


def _build(names: list[str]) -> int:
    unknown = sorted(set(names) - set(RECIPES))
    if unknown:
        raise ClusterError(f"no recipe for {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    for name in names or (name for name, recipe in RECIPES.items() if recipe.tested_with):
        print(binaries(name))
    return 0


def _up(folder: Path, node: bool) -> int:
    print(f"export KUBECONFIG={shlex.quote(str(lifecycle.up(folder, node=node)))}")
    return 0


def _kubelet(folder: Path, what: str) -> int:
    if what == "stop":
        lifecycle.stop_kubelet(folder)
    else:
        lifecycle.start_kubelet(folder)
    return 0


def _load(folder: Path, archives: list[Path]) -> int:
    for archive in archives:
        print("\n".join(lifecycle.load(folder, archive)))
    return 0


def _down(folder: Path) -> int:
    print(f"ended: {', '.join(lifecycle.down(folder)) or 'nothing was running'}")
    return 0


def _status(folder: Path) -> int:
    running = lifecycle.running(folder)
    expected = lifecycle.expected(folder)
    for name in expected:
        print(f"{name}: {f'runs as {running[name].pid}' if name in running else 'does not run'}")
    if not set(expected) <= set(running):
        return 1
    print(f"export KUBECONFIG={shlex.quote(str(lifecycle.kubeconfig(folder)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
