"""Stage `image`: build, pull, migrate and identify the image that stages run in."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
from pathlib import Path

from dlscale.core.errors import UserError
from dlscale.core.files import sha256
from dlscale.core.machine import command_output
from dlscale.core.process import Image
from dlscale.launch.launcher import LOCAL


def identity(engine: str, image: str) -> str | None:
    """Return the identity of an image's content; None without an engine, or if the image is missing.

    For podman and docker, the identity is the digest of the image's configuration. For Shifter, it is the gateway's
    identifier. For Apptainer, it is the SHA-256 of the file.
    """
    if engine == "none" or not image:
        return None
    if engine == "apptainer":
        return sha256(image) if Path(image).is_file() else None
    inspect = [engine, "image", "inspect", "--format", "{{.Id}}", image]
    words = (command_output(["shifterimg", "lookup", image] if engine == "shifter" else inspect) or "").split()
    return words[-1] if words else None


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


def main(args: argparse.Namespace) -> None:
    """Build or pull `args.image` for `args.engine`, and migrate it for podman-hpc."""
    engine, image = args.engine, args.image
    if engine == "none" or not image:
        raise UserError("site: no container engine, or no image; set site.engine and site.image, or name a profile")
    if engine == "apptainer":
        if not Path(image).is_file():
            raise UserError(f"{image}: no such file; to make this file: apptainer pull {image} docker://NAME")
    elif engine == "shifter":
        _run(["shifterimg", "pull", image])
    elif image.startswith(LOCAL):
        if not Path("docker/Dockerfile").is_file():
            remedy = "build the image in a checkout of dlscale, or set site.image to a published image"
            raise UserError(f"{image}: cannot be built, because this folder has no docker/Dockerfile; {remedy}")
        words = [engine, "build", "--file=docker/Dockerfile", f"--target={args.target}", f"--tag={image}"]
        if engine != "docker":
            words += ["--format=docker", "--network=host"]  # the OCI format does not support HEALTHCHECK
        _run([*words, *(f"--build-arg={item}" for item in args.build_arg), "."])
    else:
        _run([engine, "pull", image])
    if engine == "podman-hpc":  # compute nodes see only migrated images; `migrate` reports success even if it failed
        _run([engine, "migrate", image])
        if not migrated(image):
            raise UserError(f"{image}: `podman-hpc images` does not list this image as migrated (R/O); see the log")
    here = identity(engine, image)
    if here is None:
        raise UserError(
            f"{image}: {engine} does not have this image after the build or pull; see the engine's output above"
        )
    logging.info("%s: %s", image, here)


def migrated(image: str) -> bool:
    """Return whether podman-hpc lists the image as migrated."""
    words = ["podman-hpc", "images", "--format", "{{.Repository}}:{{.Tag}} {{.ReadOnly}}"]
    return f"{image if ':' in image else image + ':latest'} true" in (command_output(words) or "").splitlines()


def _run(words: list[str]) -> None:
    logging.info("%s", " ".join(words))
    try:
        status = subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise UserError(
            f"{words[0]}: no such command here; install it, or set site.engine to an installed engine"
        ) from None
    if status:
        raise UserError(f"{' '.join(words[:2])} failed with status {status}; see the command's output in the log")
