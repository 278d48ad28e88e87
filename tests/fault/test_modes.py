"""Whose files are, and who may read them: as the directory and the umask have it."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.saves import names_in, save, small_state, worker_pids

# Source: linux/posix_acl_xattr.h: the version, then (tag, permissions, id) of each entry.
_ACL_VERSION = 2
_NOBODY_IN_PARTICULAR = 0xFFFFFFFF
_ACL = [
    (0x01, 7, _NOBODY_IN_PARTICULAR),  # the owner
    (0x02, 7, 12_345),  # a user by number
    (0x04, 5, _NOBODY_IN_PARTICULAR),  # the group
    (0x10, 7, _NOBODY_IN_PARTICULAR),  # the mask
    (0x20, 0, _NOBODY_IN_PARTICULAR),  # others
]
_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def rights(path: Path) -> tuple[int, int, int, bytes]:
    """Mode, owner, group and access list."""
    status = path.stat()
    try:
        acl = os.getxattr(path, _ACCESS)
    except OSError:
        acl = b""
    return status.st_mode & 0o7777, status.st_uid, status.st_gid, acl


def file_rights(folder: Path) -> tuple[int, int, int, bytes]:
    """Of a file that any program makes in there."""
    control = folder / "control"
    control.write_bytes(b"")
    try:
        return rights(control)
    finally:
        control.unlink()


def make_shared(folder: Path) -> None:
    """A directory of a group, whose files are to be the group's."""
    folder.mkdir()
    groups = [12_345] if os.geteuid() == 0 else [g for g in os.getgroups() if g != os.getgid()]
    if groups:
        os.chown(folder, -1, groups[0])
    folder.chmod(0o2775)


def make_listed(folder: Path) -> None:
    """A directory with a default access list, which takes the place of the umask."""
    folder.mkdir()
    acl = struct.pack("<I", _ACL_VERSION)
    acl += b"".join(struct.pack("<HHI", *entry) for entry in _ACL)
    with contextlib.suppress(OSError):  # a filesystem without: an ordinary directory then
        os.setxattr(folder, _DEFAULT, acl)


@pytest.mark.parametrize("make", [make_shared, make_listed])
@pytest.mark.parametrize("below", ["", "made/by/us"])
def test_files_have_the_rights_of_any_file_there(
    make: Callable[[Path], None], below: str, tmp_path: Path
) -> None:
    """Issue 4: setgid and default ACL, directly in there and in directories that a save makes.

    The umask changes from save to save, and the workers stay; what is overwritten has the new one.
    """
    base = tmp_path / "base"
    make(base)
    folder = base / below
    workers = None
    for number, mask in enumerate((0o022, 0o027, 0o077, 0o002)):
        with umask(mask):
            save(folder, small_state(number))
            expected = file_rights(folder)
        names = names_in(folder)
        assert len(names) == 3 and ".metadata" in names
        for name in names:
            assert rights(folder / name) == expected, (oct(mask), name)
        assert workers in (None, worker_pids())
        workers = worker_pids()


def test_directories_have_the_rights_of_any_directory_there(tmp_path: Path) -> None:
    """Those that a save makes: setgid goes on, the mode is what the umask gives."""
    make_shared(tmp_path / "base")
    with umask(0o027):
        save(tmp_path / "base" / "one" / "two", small_state(1))
        (tmp_path / "base" / "control").mkdir()
    expected = rights(tmp_path / "base" / "control")
    assert expected[0] == 0o2750
    for made in ("one", "one/two"):
        assert rights(tmp_path / "base" / made) == expected
