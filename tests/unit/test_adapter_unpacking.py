"""app.adapters.unpacking: what may be in an archive, and that nothing lands where the archive says."""

import gzip
import io
import stat
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from app.adapters import AdapterRefused, AdapterTooLarge, AdapterUnreachable
from app.adapters.archive_readers import MOST
from app.adapters.intake import CONFIG, FILES, WEIGHTS, Intake
from app.adapters.limits import Limits
from app.adapters.unpacking import MAX_MEMBERS, unpack

LIMIT = 3_000_000
GOOD = {CONFIG: b"{}", WEIGHTS: bytes(range(256)) * 5000}

Pack = Callable[[dict[str, bytes]], bytes]


def tar(files: dict[str, bytes], more: list[tarfile.TarInfo] | None = None, form: int = tarfile.PAX_FORMAT) -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w", format=form) as archive:
        for info in more or []:
            archive.addfile(info)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return into.getvalue()


def tgz(files: dict[str, bytes]) -> bytes:
    return gzip.compress(tar(files))


def deflated(files: dict[str, bytes]) -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return into.getvalue()


def member(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.into, scratch = root / "scratch" / "adapter", root / "scratch"
        self.into.mkdir(parents=True)
        self.intake = Intake(self.into, scratch, Limits.of(LIMIT / 1e6, 60))

    def unpack(self, packed: bytes) -> None:
        path = self.root / "scratch" / "archive"
        path.write_bytes(packed)
        try:
            unpack(path, self.intake)
        finally:
            found = {str(one.relative_to(self.root)) for one in self.root.rglob("*") if not one.is_dir()}
            assert found <= {"scratch/archive", *(f"scratch/adapter/{name}" for name in FILES)}

    def refusal(self, packed: bytes) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            self.unpack(packed)
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


PACKS = pytest.mark.parametrize("pack", [tar, tgz, deflated])


@PACKS
@pytest.mark.parametrize("folder", ["", "./", "my-adapter/", "a/b/"])
def test_a_good_one(pack: Pack, folder: str, place: Place) -> None:
    others = {f"{folder}README.md": b"read me", "._junk": b"", f"{folder}checkpoint/optimizer.pt": b"pickle"}
    place.unpack(pack({f"{folder}{name}": data for name, data in GOOD.items()} | others))
    assert {one.name: one.read_bytes() for one in place.into.iterdir()} == GOOD


def test_the_version_is_of_the_content_alone(tmp_path: Path) -> None:
    versions = set()
    for number, packed in enumerate((tar(GOOD), tgz(GOOD), deflated({f"x/{name}": one for name, one in GOOD.items()}))):
        place = Place(tmp_path / str(number))
        place.unpack(packed)
        versions.add(place.intake.version)
    assert len(versions) == 1
    other = Place(tmp_path / "other")
    other.unpack(tar(GOOD | {CONFIG: b"{ }"}))
    assert versions != {other.intake.version}


@PACKS
@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", f"../{CONFIG}", "..", "a\\..\\evil"])
def test_a_member_that_leads_out(pack: Pack, name: str, place: Place) -> None:
    assert "leads out of it" in place.refusal(pack(GOOD | {name: b"x"})).message
    assert "leads out of it" in place.refusal(pack({name: b"x"} | GOOD)).message


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE]
)
@pytest.mark.parametrize("name", ["x", WEIGHTS])
def test_a_link_or_a_device(kind: bytes, name: str, place: Place) -> None:
    files = {key: one for key, one in GOOD.items() if key != name}
    assert (
        "is neither a regular file nor a folder"
        in place.refusal(tar(files, [member(name, kind, "/etc/passwd")])).message
    )


def test_a_link_in_a_zip(place: Place) -> None:
    into = io.BytesIO(deflated({CONFIG: b"{}"}))
    with zipfile.ZipFile(into, "a") as archive:
        info = zipfile.ZipInfo(WEIGHTS)
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert "is neither a regular file nor a folder" in place.refusal(into.getvalue()).message


def test_a_sparse_file(place: Place) -> None:
    info = tarfile.TarInfo(WEIGHTS)
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 50), "GNU.sparse.numblocks": "1"}
    assert "regular file" in place.refusal(tar({CONFIG: b"{}"}, [info])).message


@PACKS
def test_more_bytes_than_allowed(pack: Pack, place: Place) -> None:
    assert isinstance(place.refusal(pack(GOOD | {WEIGHTS: bytes(LIMIT)})), AdapterTooLarge)


def test_a_bomb_beside_the_adapter(place: Place) -> None:
    assert isinstance(place.refusal(tgz({"bomb": bytes(20 * LIMIT)} | GOOD)), AdapterTooLarge)
    place = Place(place.root / "behind")
    assert isinstance(place.refusal(gzip.compress(tar(GOOD) + bytes(20 * LIMIT))), AdapterTooLarge)


def test_a_length_that_is_not_true(place: Place) -> None:
    packed = bytearray(deflated(GOOD))
    at = packed.rindex(b"PK\x01\x02")
    struct.pack_into("<I", packed, at + 24, 10)  # the size that the directory tells of the weights
    assert place.refusal(bytes(packed))


@PACKS
def test_more_members_than_allowed(pack: Pack, place: Place) -> None:
    assert "more than 1000 members" in place.refusal(pack({f"{one}": b"" for one in range(MAX_MEMBERS)} | GOOD)).message


def test_a_header_that_takes_memory(place: Place) -> None:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "x" * (2 * MOST)}
    assert f"a header of more than {MOST} bytes" in place.refusal(tar(GOOD, [info])).message
    place = Place(place.root / "gnu")
    assert (
        f"more than {MOST} bytes"
        in place.refusal(tar(GOOD, [tarfile.TarInfo("x" * 2 * MOST)], tarfile.GNU_FORMAT)).message
    )


def test_a_directory_that_takes_memory(place: Place) -> None:
    names = {f"{one:0200}": b"" for one in range(2 * MOST // 246)}
    assert f"a header of more than {MOST} bytes" in place.refusal(deflated(GOOD | names)).message


@PACKS
def test_a_truncated_archive(pack: Pack, tmp_path: Path) -> None:
    whole = pack(GOOD)
    for number, kept in enumerate((0, 1, 10, 300, len(whole) // 3, len(whole) - len(whole) // 10)):
        assert Place(tmp_path / str(number)).refusal(whole[:kept])


def test_a_gzip_with_a_wrong_checksum(place: Place) -> None:
    packed = bytearray(tgz(GOOD))
    packed[-6] ^= 1
    assert "damaged" in place.refusal(bytes(packed)).message


@pytest.mark.parametrize(
    "data", [b"<html>", bytes(10_000), b"PK", b"PK\x03\x04" + bytes(100), b"\x1f\x8b" + bytes(100)]
)
def test_what_is_no_archive(data: bytes, place: Place) -> None:
    assert "the archive" in place.refusal(data).message


def test_an_encrypted_zip(place: Place) -> None:
    packed = bytearray(deflated(GOOD))
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        packed[packed.index(signature) + at] |= 1
    assert "encrypted" in place.refusal(bytes(packed)).message


def test_another_compression(place: Place) -> None:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in GOOD.items():
            archive.writestr(name, data)
    assert "another way than deflate" in place.refusal(into.getvalue()).message


@PACKS
def test_files_that_are_missing(pack: Pack, place: Place) -> None:
    assert "the archive" in place.refusal(pack({})).message
    assert f"the archive has no {CONFIG}" in place.refusal(pack({WEIGHTS: b"x"})).message


@PACKS
def test_a_pickle(pack: Pack, place: Place) -> None:
    refusal = place.refusal(pack({CONFIG: b"{}", "adapter_model.bin": b"x"}))
    assert refusal.message == f"the archive has adapter_model.bin: pickle is refused; convert it to {WEIGHTS}"


@PACKS
def test_two_adapters(pack: Pack, tmp_path: Path) -> None:
    both = {f"{folder}/{name}": data for folder in "ab" for name, data in GOOD.items()}
    assert f"more than one {CONFIG}" in Place(tmp_path / "1").refusal(pack(both)).message
    halves = {f"a/{CONFIG}": b"{}", f"b/{WEIGHTS}": b"x"}
    assert "files of one folder" in Place(tmp_path / "2").refusal(pack(halves)).message
    folder = {CONFIG: b"{}", f"{WEIGHTS}/x": b"x"}
    assert "has no adapter_model" in Place(tmp_path / "3").refusal(pack(folder)).message


def test_time_that_is_over(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.intake = Intake(place.into, place.root / "scratch", Limits(LIMIT, 1.5, time.monotonic()))
    refusal = place.refusal(tgz(GOOD))
    assert isinstance(refusal, AdapterUnreachable) and "(1.5 s)" in refusal.message
