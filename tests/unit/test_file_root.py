"""app.media.file_root: files of one folder, whatever leads out of it."""

import os
import re
from pathlib import Path

import pytest

from app.errors.media import MediaRefused, MediaTooLarge, MediaUrlRefused
from app.media import file_root
from app.media.file_root import FileRoot
from app.media.url_policy import MAX_LENGTH
from app.settings import SettingsError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A root with files and links, and a secret beside it."""
    root = tmp_path / "media"
    (root / "deep").mkdir(parents=True)
    (root / "cat.png").write_bytes(b"cat")
    (root / "deep" / "ein hübscher.png").write_bytes(b"dog")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "secret").write_bytes(b"secret")
    (root / "inside").symlink_to("deep/../cat.png")
    (root / "absolute").symlink_to(root / "cat.png")
    (root / "outside").symlink_to(tmp_path / "secret")
    (root / "relative").symlink_to("../secret")
    (root / "up").symlink_to("..")
    (root / "proc").symlink_to("/proc/self/environ")
    (root / "nowhere").symlink_to("/does/not/exist")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    return root


def refusal(root: Path | None, url: str) -> MediaRefused:
    with pytest.raises(MediaRefused) as caught:
        FileRoot(None if root is None else str(root)).read(url, 100)
    return caught.value


@pytest.mark.parametrize("name", ["cat.png", "inside", "absolute", "./cat.png", "/cat.png"])
def test_a_file_and_links_that_stay_inside(folder: Path, name: str) -> None:
    root = FileRoot(str(folder))
    assert root.read(f"file://{folder}/{name}", 3) == b"cat"
    assert root.read(f"FILE://localhost{folder}/{name}", 3) == b"cat"


def test_a_name_in_percent_encoding(folder: Path) -> None:
    assert FileRoot(str(folder)).read(f"file://{folder}/deep/ein%20h%C3%BCbscher.png", 3) == b"dog"


def test_the_root_may_be_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert FileRoot(str(tmp_path / "link")).read(f"file://{folder}/cat.png", 3) == b"cat"


@pytest.mark.parametrize("name", ["outside", "relative", "up/secret", "proc", "up/media2/secret"])
def test_links_that_lead_out(folder: Path, name: str) -> None:
    assert isinstance(refusal(folder, f"file://{folder}/{name}"), MediaUrlRefused)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file:///",
        "file://{root}",
        "file://{root}/",
        "file://{root}/deep",
        "file://{root}/../secret",
        "file://{root}/deep/../../secret",
        "file://{root}/%2e%2e/secret",
        "file://{root}/..%2fsecret",
        "file://{root}2/secret",
        "file://{root}/cat.png%00.jpg",
        "file://{root}/cat.png?x",
        "file://{root}/cat.png#x",
        "file://{root}/cat\n.png",
        r"file://{root}\cat.png",
        "file://example.com{root}/cat.png",
        "file:{root}/cat.png",
        "file:cat.png",
        "file://",
        "file:",
        "file://{root}/pipe",
        "file://{root}/nowhere",
        "file://{root}/loop",
        "file://{root}/missing.png",
        "file://{root}/cat.png/x",
    ],
)
def test_what_is_not_read(folder: Path, url: str) -> None:
    error = refusal(folder, url.format(root=folder))
    assert error.status == 400
    assert not re.search(r"media/|etc|secret|passwd|0x|/tmp", error.message)


def test_a_url_is_no_longer_than_others_may_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is checked on the event loop, before anything of it is decoded."""
    root = FileRoot(str(folder))
    longest = f"file://{folder}/" + "./" * ((MAX_LENGTH - len(f"file://{folder}/cat.png")) // 2) + "cat.png"
    assert root.read(longest, 3) == b"cat"
    monkeypatch.setattr(file_root, "unquote_to_bytes", lambda _: pytest.fail("decoded"))
    with pytest.raises(MediaUrlRefused, match=f"longer than {MAX_LENGTH} characters"):
        root.check(f"file://{folder}/" + "a/" * MAX_LENGTH)


def test_without_a_root_nothing_is_read(folder: Path) -> None:
    error = refusal(None, f"file://{folder}/cat.png")
    assert isinstance(error, MediaUrlRefused) and "media_urls.allowed_local_media_path" in error.message


def test_the_limit_is_on_what_is_read(folder: Path) -> None:
    root = FileRoot(str(folder))
    with pytest.raises(MediaTooLarge, match="media.max_item_mb"):
        root.read(f"file://{folder}/cat.png", 2)


def test_an_endless_file(folder: Path) -> None:
    (folder / "zero").symlink_to("/dev/zero")
    assert isinstance(refusal(folder, f"file://{folder}/zero"), MediaUrlRefused)


def test_what_is_swapped_after_the_check_is_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is a link to the secret by the time that its content is read."""
    looked_at = os.fstat

    def swap(descriptor: int) -> os.stat_result:
        (folder / "cat.png").unlink()
        (folder / "cat.png").symlink_to(tmp_path / "secret")
        return looked_at(descriptor)

    monkeypatch.setattr(os, "fstat", swap)
    assert FileRoot(str(folder)).read(f"file://{folder}/cat.png", 100) == b"cat"


def test_a_root_that_is_no_folder(folder: Path) -> None:
    with pytest.raises(SettingsError, match="media_urls.allowed_local_media_path"):
        FileRoot(str(folder / "cat.png"))
