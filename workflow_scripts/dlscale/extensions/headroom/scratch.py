"""Run a program in a scratch copy: all files that it writes are in a temporary folder, and are removed with the folder.

`python -I scratch.py SCRATCH STEPS FOLDER... -- COMMAND` gives the process a mount namespace of its own (Linux 5.12 or
later; without root, the machine must allow user namespaces). In this namespace, the program sees and changes a copy of
each FOLDER and of shared memory (overlay file systems: only written files are copied). Everything else is read-only,
except STEPS and devices. Then COMMAND replaces this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: Environment variable with the inode of the scratch copy's mount namespace.
SCRATCH = "DLSCALE_SCRATCH"

#: Exit status if no scratch copy can be made; name of the file in STEPS with the reason.
REFUSED, REASON = 125, "refused"

#: Exit statuses of a shell for a missing command, and for a file that cannot be executed.
NOT_FOUND, NO_PROGRAM = 127, 126

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
#: Number of `mount_setattr` (equal on all processors except Alpha); its flags for read-only mounts and for subtrees.
MOUNT_SETATTR, MOUNT_ATTR_RDONLY, AT_RECURSIVE, AT_FDCWD = 442, 1, 0x8000, -100

#: Folders of devices, processes and the kernel, which stay writable.
DEVICES = ("/dev", "/proc", "/sys")

#: Folder of shared memory, which programs use between processes, and for temporary files.
SHARED = "/dev/shm"

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    words = [text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _set_read_only(path: str, on: bool) -> None:
    """Make all mounts at and below `path` read-only, or writable again."""
    # struct mount_attr: attributes to set, attributes to clear, propagation, user namespace
    flags = (0, MOUNT_ATTR_RDONLY, 0, 0)
    attributes = (ctypes.c_uint64 * 4)(*((flags[1], 0, 0, 0) if on else flags))
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, size)
    _check(result, f"mount_setattr {path}")


def _own_namespace() -> None:
    """Move this process into a mount namespace of its own; without root also into a user namespace."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", "/", "none", MS_REC | MS_PRIVATE)


def outermost(folders: Sequence[str]) -> list[str]:
    """Return the folders to copy.

    Missing folders, `/`, folders in `DEVICES`, and folders below a folder to copy on the same file system are left out.
    """
    found = list[Path]()
    for folder in sorted({Path(each).resolve() for each in folders if os.path.isdir(each)}):  # noqa: PTH112
        if str(folder) == "/" or any(folder.is_relative_to(each) for each in DEVICES):
            continue
        above = next((each for each in found if folder.is_relative_to(each)), None)
        if above is None or above.stat().st_dev != folder.stat().st_dev:
            found.append(folder)
    return [str(each) for each in found]


def mounts_below(folders: Sequence[str]) -> list[str]:
    """Return the mount points below folders, outer mount points first."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    places = {row[4].encode().decode("unicode_escape").encode("latin-1").decode() for row in rows}
    return sorted(place for place in places if any(place.startswith(f"{folder}/") for folder in folders))


def enter(scratch: str, steps: str, folders: Sequence[str]) -> None:
    """Enter a mount namespace with writable copies of `folders` and the original `steps`; all else is read-only."""
    here = os.getcwd()  # noqa: PTH109
    _own_namespace()
    # An overlay hides the file systems that are mounted in its lower folder, so each mount gets its own overlay.
    within = mounts_below(folders)
    places = sorted({*folders, *within, SHARED})
    opened = {place: os.open(place, os.O_PATH) for place in places}
    written = os.open(steps, os.O_PATH)
    memory = Path(scratch, "memory")
    memory.mkdir()
    _mount("tmpfs", str(memory), "tmpfs", 0)  # shared memory stays in memory
    layers = {place: os.open(memory if place == SHARED else scratch, os.O_PATH) for place in places}
    copies = []
    for number, place in enumerate(places):
        lower = f"/proc/self/fd/{opened[place]}"
        upper, work = (f"/proc/self/fd/{layers[place]}/{number}.{name}" for name in ("files", "work"))
        for each in (upper, work):
            os.mkdir(each)  # noqa: PTH102
        try:
            _mount("overlay", place, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")
        except OSError:
            if place not in within:
                raise
            _mount(lower, place, "none", MS_BIND)  # such as a single file, or a file system without support of overlays
        else:
            copies.append(place)
    _mount(f"/proc/self/fd/{written}", steps, "none", MS_BIND)
    _set_read_only("/", True)
    for each in filter(os.path.isdir, DEVICES):
        with contextlib.suppress(OSError):  # without root, read-only mounts stay read-only
            _set_read_only(each, False)
    for each in (*copies, steps):
        _set_read_only(each, False)
    for place in places:
        if place not in copies:
            _set_read_only(place, True)
    for number in (*opened.values(), *layers.values(), written):
        os.close(number)
    os.chdir(here)
    os.environ[SCRATCH] = str(Path("/proc/self/ns/mnt").stat().st_ino)


def main(arguments: list[str]) -> None:
    """Enter the scratch copy and execute the command; if no copy can be made, write the reason and exit."""
    cut = arguments.index("--")
    scratch, steps, *folders = arguments[:cut]
    try:
        enter(scratch, steps, outermost(folders))
    except OSError as error:
        part = Path(steps, f"{REASON}.part")
        part.write_text(f"no scratch copy can be made here ({error.strerror})")
        part.replace(Path(steps, REASON))
        sys.exit(REFUSED)
    try:
        os.execvp(arguments[cut + 1], arguments[cut + 1 :])
    except OSError as error:
        sys.exit(NOT_FOUND if error.errno == errno.ENOENT else NO_PROGRAM)


if __name__ == "__main__":
    main(sys.argv[1:])
