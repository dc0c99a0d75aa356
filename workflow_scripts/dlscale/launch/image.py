"""Stage `image`: build, pull, migrate and identify the image that stages run in."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import sha256
from dlscale.core.machine import command_output
from dlscale.core.process import Image
from dlscale.launch.launcher import FILE_SUFFIXES, LOCAL

#: Commands that make an engine's image file from an image of podman, Docker or a registry.
MAKE_FILE = {
    "apptainer": "podman save --format docker-archive --output dlscale.tar {built} && apptainer build {file} "
    "docker-archive:dlscale.tar (from a registry: apptainer pull {file} docker://REGISTRY/NAME:TAG)",
    "enroot": "enroot import --output {file} podman://{built} (from Docker: dockerd://{built}; from a registry: "
    "docker://REGISTRY#NAME:TAG)",
}


def identity(engine: str, image: str) -> str | None:
    """Return the identity of an image's content; None without an engine, or if the image is missing.

    For podman, docker and podman-hpc, the identity is the digest of the image's configuration; podman-hpc's image must
    be migrated. For Shifter, it is the gateway's identifier. For Apptainer and enroot, it is the SHA-256 of the file.
    """
    if engine == "none" or not image:
        return None
    if engine in FILE_SUFFIXES:
        return sha256(image) if Path(image).is_file() else None
    if engine == "podman-hpc":
        return migrated(image)
    lookup = ["shifterimg", "lookup", image] if engine == "shifter" else _inspect(engine, image)
    words = (command_output(lookup) or "").split()
    return words[-1] if words else None


def _inspect(engine: str, image: str) -> list[str]:
    return [engine, "image", "inspect", "--format", "{{.Id}}", image]


def image_identity(engine: str, image: str, first: bool) -> str:
    """Return the image's identity, or "" if the image is missing.

    The first process of a workflow call determines the identity, and passes it to the processes of jobs in an
    environment variable.
    """
    told = Image.read()
    if not first and told and (told.engine, told.name) == (engine, image):
        return told.identity
    os.environ.pop("DLSCALE_IMAGE", None)
    here = identity(engine, image) or ""
    if here:
        Image(engine, image, here).write()
    return here


def file_remedy(engine: str, image: str) -> str:
    """Return what `site.image` has to be for an engine with image files, and the commands that make the file."""
    file = Path(image if image.endswith(FILE_SUFFIXES[engine]) else f"dlscale{FILE_SUFFIXES[engine]}")
    commands = MAKE_FILE[engine].format(file=file, built=image if image.startswith(LOCAL) else f"{LOCAL}dlscale:gpu")
    return f"site.image has to be a {file.suffix} file. To make {file}: {commands}"


def main(args: argparse.Namespace) -> None:
    """Build or pull `args.image` for `args.engine`, and migrate it for podman-hpc.

    For Apptainer and enroot, only check that the image file exists.
    """
    engine, image = args.engine, args.image
    if engine == "none" or not image:
        raise UserError("site: no container engine, or no image; set site.engine and site.image, or name a profile")
    if engine in FILE_SUFFIXES:
        if not Path(image).is_file():
            raise UserError(f"{image}: no such file; {file_remedy(engine, image)}")
    elif engine == "shifter":
        # `shifterimg` exits with 0 even if the pull failed, and an older image with this name may exist.
        _run(["shifterimg", "pull", image], "READY")
    elif image.startswith(LOCAL):
        if not Path("docker/Dockerfile").is_file():
            remedy = "build the image in a checkout of dlscale, or set site.image to a published image"
            raise UserError(f"{image}: cannot be built, because this folder has no docker/Dockerfile; {remedy}")
        words = [engine, "build", "--file=docker/Dockerfile", f"--target={args.target}", f"--tag={image}"]
        if engine != "docker":
            # `podman-hpc migrate` cannot start an image with a health check, because it has no systemd session. The
            # OCI format drops the Dockerfile's HEALTHCHECK.
            words += [f"--format={'docker' if engine == 'podman' else 'oci'}", "--network=host"]
        _run([*words, *(f"--build-arg={item}" for item in args.build_arg), "."])
    else:
        _run([engine, "pull", image])
    if engine == "podman-hpc":  # compute nodes see only migrated images; `migrate` reports success even if it failed
        _run([engine, "migrate", image])
        built = (command_output(_inspect(engine, image)) or "").strip().removeprefix("sha256:")
        if not built or built != (migrated(image) or "").removeprefix("sha256:"):
            raise UserError(f"{image}: `podman-hpc images` does not list this image as migrated (R/O); see the log")
    here = identity(engine, image)
    if here is None:
        raise UserError(
            f"{image}: {engine} does not have this image after the build or pull; see the engine's output above"
        )
    logging.info("%s: %s", image, here)


def migrated(image: str) -> str | None:
    """Return the identity of a migrated image of podman-hpc; None if it is not listed as migrated.

    `image inspect` would look into the storage of one login node; compute nodes and other login nodes see only migrated
    images.
    """
    row = rf"^(?:docker\.io/(?:library/)?|localhost/)?{re.escape(image)}(?::latest)? (\S+) true$"
    listed = command_output(
        ["podman-hpc", "images", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}} {{.ReadOnly}}"]
    )
    return next(iter(re.findall(row, listed or "", re.MULTILINE)), None)


def _run(words: list[str], wanted: str = "") -> None:
    """Run a command; with `wanted`, the command's last printed status must begin with this word."""
    logging.info("%s", " ".join(words))
    try:
        done = subprocess.run(words, check=False, stdout=subprocess.PIPE if wanted else None, text=True)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]}: no such command here; install it, or set site.engine to an installed engine"
        ) from None
    logging.info("%s", done.stdout or "")
    if done.returncode or not (done.stdout or "").rpartition("status:")[2].strip().startswith(wanted):
        raise UserError(f"{' '.join(words[:3])} failed with status {done.returncode}; see its output in the log")
