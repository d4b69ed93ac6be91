"""``python -m dlrm_cluster.project_images build``: one line an image, its name and its archive."""

import argparse
import sys
from typing import get_args

from dlrm_cluster.errors import ClusterError
from dlrm_cluster.project_images import RECIPES, Variant, build
from dlrm_cluster.project_images.buildah import DEBIAN


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 when it failed."""
    parser = argparse.ArgumentParser(prog="python -m dlrm_cluster.project_images", description="The project's images.")
    command = parser.add_subparsers(dest="command", required=True).add_parser("build", help="build what changed")
    command.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(RECIPES)}; all by default")
    command.add_argument("--base", default=DEBIAN, help="base image; by default one is made of Debian's packages")
    command.add_argument("--variant", choices=get_args(Variant), default="cpu", help="of the trainer (%(default)s)")
    options = parser.parse_args(argv)
    try:
        for image in build(options.names or RECIPES, base=options.base, variant=options.variant):
            print(f"{image.reference}\t{image.archive}")
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
