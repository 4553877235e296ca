"""app.adapters.sources: what is written how, and local folders."""

import os
import threading
from pathlib import Path

import pytest

from app.adapters import AdapterRefused, AdapterTooLarge, AdapterUnreachable
from app.adapters.intake import CONFIG, FILES, WEIGHTS, Intake
from app.adapters.limits import CHUNK, Limits
from app.adapters.sources import find
from app.settings import SettingsError
from app.settings_adapters import AdapterSettings
from app.settings_media import MediaUrlSettings


class Place:
    """An allowed root beside something that is not allowed."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside = folder / "root", folder / "outside"
        for one in (self.root / "sql", self.outside):
            one.mkdir(parents=True)
            (one / CONFIG).write_text("{}")
            (one / WEIGHTS).write_bytes(b"weights")
        self.into = folder / "into"
        self.into.mkdir()
        self.settings = AdapterSettings(allowed_root=str(self.root))

    def take(self, source: str, limits: Limits | None = None) -> dict[str, bytes]:
        limits = limits or Limits.of(1, 60)
        find(source, self.settings, MediaUrlSettings()).take(Intake(self.into, self.into, limits))
        return {one.name: one.read_bytes() for one in self.into.iterdir()}

    def refusal(self, source: str) -> AdapterRefused:
        with pytest.raises(AdapterRefused) as caught:
            self.take(source)
        assert not {one.read_bytes() for one in self.into.iterdir()} & {b"weights", b"secret"}
        return caught.value


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "is empty"),
        ("x" * 10_000, "longer than 8192"),
        ("s3://bucket/a\nb", "control characters"),
        ("relative/path", "an adapter's source is s3://"),
        ("org/repo", "an adapter's source is s3://"),
        ("ftp://host/x.tar", "an adapter's source is s3://"),
        ("http://host/x.tar", "an adapter's source is s3://"),
        ("s3://bucket", "written as s3://bucket/prefix"),
        ("s3://bucket/", "written as s3://bucket/prefix"),
        ("s3://bucket//", "written as s3://bucket/prefix"),
        ("s3:///prefix", "written as s3://bucket/prefix"),
        ("s3://user@bucket/prefix", "written as s3://bucket/prefix"),
        ("s3://bucket/prefix?versionId=1", "written as s3://bucket/prefix"),
        ("s3://arn:aws:s3:::bucket/prefix", "written as s3://bucket/prefix"),
        ("hf://repo", "written as hf://org/repo"),
        ("hf://org/repo/file", "written as hf://org/repo"),
        ("hf://org/../repo", "written as hf://org/repo"),
        ("hf://org/repo@", "written as hf://org/repo"),
        ("hf://org/repo@a..b", "written as hf://org/repo"),
        ("hf://org/repo@main?x", "written as hf://org/repo"),
        ("https://user@host/x.tar", "must not have a user"),
        ("https://127.0.0.1/x.tar", "private, local or reserved"),
        ("https://[::ffff:169.254.169.254]/x.tar", "private, local or reserved"),
        ("https://host:22/x.tar", "media_urls.allowed_ports"),
        ("https://host\\@evil/x.tar", "backslash"),
        ("file:/tmp/x", "written as file:///path"),
        ("file://host/tmp/x", "written as file:///path"),
        ("file:///tmp/x?y", "must not have"),
        ("file:///tmp/%00", "a null character"),
    ],
)
def test_a_source_that_is_not_allowed(source: str, said: str, place: Place) -> None:
    assert said in place.refusal(source).message


def test_local_sources_are_off_by_default() -> None:
    for source in ("/etc", "file:///etc"):
        with pytest.raises(AdapterRefused, match="adapters.allowed_root can allow a folder"):
            find(source, AdapterSettings(), MediaUrlSettings())


def test_a_root_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="adapters.allowed_root"):
        find("/x", AdapterSettings(allowed_root=str(tmp_path / "absent")), MediaUrlSettings())


@pytest.mark.parametrize("form", ["{}", "{}/", "file://{}", "file://localhost{}", "FILE://{}"])
def test_a_local_folder(form: str, place: Place) -> None:
    (place.root / "sql" / "optimizer.pt").write_bytes(b"not taken")
    assert place.take(form.format(place.root / "sql")) == {CONFIG: b"{}", WEIGHTS: b"weights"}


def test_a_name_with_a_percent(place: Place) -> None:
    (place.root / "sql").rename(place.root / "a%20b c")
    assert place.take(f"file://{place.root}/a%2520b%20c").keys() == {*FILES}


def test_a_path_outside_of_the_root(place: Place) -> None:
    for path in (place.outside, "/etc", f"{place.root}x"):
        Path(f"{place.root}x").mkdir(exist_ok=True)
        assert "leads out of adapters.allowed_root" in place.refusal(str(path)).message
    for dots in (f"{place.root}/../outside", f"file://{place.root}/%2e%2e/outside"):
        assert "has .. in it" in place.refusal(dots).message


def test_links(place: Place) -> None:
    (place.root / "inner").symlink_to(place.root / "sql")
    assert place.take(str(place.root / "inner")).keys() == {*FILES}


def test_links_that_lead_out(place: Place) -> None:
    (place.root / "folder").symlink_to(place.outside)
    assert "leads out" in place.refusal(str(place.root / "folder")).message
    (place.outside / "secret").write_bytes(b"secret")
    (place.root / "sql" / CONFIG).unlink()
    (place.root / "sql" / CONFIG).symlink_to(place.outside / "secret")
    assert "leads out" in place.refusal(str(place.root / "sql")).message


def test_what_is_no_folder_or_no_file(place: Place) -> None:
    assert "is no folder" in place.refusal(str(place.root / "sql" / CONFIG)).message
    (place.root / "sql" / CONFIG).unlink()
    os.mkfifo(place.root / "sql" / CONFIG)
    assert "is no regular file" in place.refusal(str(place.root / "sql")).message


def test_what_is_missing(place: Place) -> None:
    refusal = place.refusal(str(place.root / "absent"))
    assert isinstance(refusal, AdapterUnreachable) and "No such file" in refusal.message
    (place.root / "sql" / WEIGHTS).unlink()
    assert place.refusal(str(place.root / "sql")).message == f"the folder has no {WEIGHTS}"
    (place.root / "sql" / "adapter_model.bin").touch()
    assert "has adapter_model.bin: pickle is refused" in place.refusal(str(place.root / "sql")).message


def test_more_bytes_than_allowed(place: Place) -> None:
    (place.root / "sql" / WEIGHTS).write_bytes(bytes(2 * CHUNK))
    with pytest.raises(AdapterTooLarge, match=r"adapters.max_mb allows \(1 MB\)"):
        place.take(str(place.root / "sql"))


def test_nobody_waits_any_more(place: Place) -> None:
    stopped = threading.Event()
    stopped.set()
    limits = Limits(10**6, 60, Limits.of(1, 60).end, stopped)
    with pytest.raises(AdapterUnreachable):
        place.take(str(place.root / "sql"), limits)
