"""The project's own container images, built from its Dockerfiles by buildah: no daemon, no registry of images."""

from dlrm_cluster.project_images.building import Image, build
from dlrm_cluster.project_images.recipes import RECIPES, Variant

__all__ = ["RECIPES", "Image", "Variant", "build"]
