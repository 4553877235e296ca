"""Archives: what may be in one, and the adapter's two files out of it.

Nothing is written where an archive says. Its members are looked at one after the other, and a single one that leads out
of it, or is a link or a device, condemns the whole. Sizes are counted as they are read, whatever headers say.
"""

from __future__ import annotations

import gzip
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from app.adapters.archive_readers import Bounded, Tape
from app.adapters.base import AdapterRefused
from app.adapters.intake import FILES, Intake, missing
from app.adapters.limits import CHUNK, Limits

MAX_MEMBERS = 1000

_ZIP, _GZIP = b"PK", b"\x1f\x8b"
_DAMAGES = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    NotImplementedError,
)


@dataclass(frozen=True)
class _Member:
    """A folder, without `content`, or a regular file, whose content is read before the next member is asked for."""

    path: PurePosixPath
    content: IO[bytes] | None


def unpack(packed: Path, intake: Intake) -> None:
    """Write the adapter that is in the archive: a tar, a gzipped tar or a zip. Raises an AdapterRefused."""
    files: dict[str, PurePosixPath] = {}
    names = set()
    with _whole(), open(packed, "rb") as file:
        for number, member in enumerate(_members(file, intake.limits)):
            if number >= MAX_MEMBERS:
                raise AdapterRefused(f"the archive has more than {MAX_MEMBERS} members")
            name = member.path.name
            names.add(name)
            if member.content is None or name not in FILES:
                continue
            if name in files:
                raise AdapterRefused(f"the archive has more than one {name}")
            files[name] = member.path.parent
            intake.write(name, _chunks(member.content))
    if (problem := missing(names, "the archive")) is not None:
        raise problem
    if len({*files.values()}) != 1 or len(files) < len(FILES):
        raise AdapterRefused(f"the archive must have {' and '.join(FILES)} as files of one folder")


@contextmanager
def _whole() -> Iterator[None]:
    try:
        yield
    except _DAMAGES as error:
        raise AdapterRefused(f"the archive is damaged, or neither a tar nor a zip ({type(error).__name__})") from None


def _members(file: IO[bytes], limits: Limits) -> Iterator[_Member]:
    magic = file.read(2)
    file.seek(0)
    if magic == _ZIP:
        return _of_zip(Bounded(file))
    unzipped: Any = gzip.GzipFile(fileobj=file) if magic == _GZIP else file
    return _of_tar(Tape(unzipped, limits))


def _of_tar(tape: Tape) -> Iterator[_Member]:
    fileobj: Any = tape
    with tarfile.open(fileobj=fileobj, mode="r:") as archive:
        for one in archive:
            is_file = one.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not one.issparse()
            if not is_file and not one.isdir():
                raise _neither(one.name)
            yield _Member(_path(one.name), archive.extractfile(one) if is_file else None)
    while tape.read(CHUNK):  # to the end, where gzip has its checksum
        pass


def _of_zip(file: Bounded) -> Iterator[_Member]:
    fileobj: Any = file
    with zipfile.ZipFile(fileobj) as archive:
        for one in archive.infolist():
            kind = stat.S_IFMT(one.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _neither(one.filename)
            if one.flag_bits & 1 or one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise AdapterRefused("the archive is encrypted, or compressed in another way than deflate")
            path = _path(one.filename)
            if one.is_dir():
                yield _Member(path, None)
                continue
            with archive.open(one) as content:
                yield _Member(path, content)


def _path(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise AdapterRefused(f"the archive's member {_shown(name)} leads out of it")
    return path


def _neither(name: str) -> AdapterRefused:
    return AdapterRefused(f"the archive's member {_shown(name)} is neither a regular file nor a folder")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else f"{name[:100]}...")


def _chunks(content: IO[bytes]) -> Iterator[bytes]:
    while chunk := content.read(CHUNK):
        yield chunk
