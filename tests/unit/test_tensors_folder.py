import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.settings import SettingsError
from app.tensors import folder

OTHER = """
import sys
from pathlib import Path
from app.tensors import folder
made = folder.make_folder(Path(sys.argv[1]), "other")
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process with a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    made = folder.make_folder(tmp_path, "prefill@gpu1/../x")
    assert made.path.parent == tmp_path / f"trivet-{os.geteuid()}"
    assert re.fullmatch(rf"prefill@gpu1____x-{os.getpid()}-[0-9a-f]{{8}}", made.path.name)
    assert made.path.stat().st_mode & 0o777 == made.path.parent.stat().st_mode & 0o777 == 0o700
    second = folder.make_folder(tmp_path, "prefill@gpu1")
    assert second.path != made.path and made.path.exists()
    (made.path / "buffer").write_bytes(b"x")
    made.remove()
    made.remove()
    assert not made.path.exists() and second.path.exists()
    second.remove()
    assert list(made.path.parent.iterdir()) == []


def test_folders_of_dead_processes_are_removed_and_of_live_ones_kept(
    tmp_path: Path, other: tuple[subprocess.Popen[str], Path]
) -> None:
    process, path = other
    (path / "buffer").write_bytes(b"x")
    assert folder.sweep(tmp_path) == []
    mine = folder.make_folder(tmp_path, "mine")
    assert (path / "buffer").exists()
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert folder.sweep(tmp_path) == [path.name]
    assert not path.exists() and mine.path.exists()
    mine.remove()


def test_making_a_folder_sweeps(tmp_path: Path, other: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = other
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    folder.make_folder(tmp_path, "mine").remove()
    assert not path.exists()


def test_folders_without_a_lock_may_be_new(tmp_path: Path) -> None:
    base = tmp_path / f"trivet-{os.geteuid()}"
    base.mkdir(mode=0o700)
    unlocked, hidden = base / "worker-1-x", base / ".worker-2-x"
    for path in (unlocked, hidden):
        path.mkdir(mode=0o700)
    (hidden / folder.LOCK).touch()
    assert folder.sweep(tmp_path) == []
    for path in (unlocked, hidden):
        os.utime(path, (0, 0))
    assert folder.sweep(tmp_path) == [".worker-2-x", "worker-1-x"]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base = tmp_path / f"trivet-{os.geteuid()}"
    base.mkdir(mode=0o700)
    (base / "link").symlink_to(elsewhere)
    (base / "file").touch()
    os.utime(elsewhere, (0, 0))
    assert folder.sweep(tmp_path) == []
    assert elsewhere.exists() and (base / "link").is_symlink()


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_user_folder_that_is_not_the_users_alone(kind: str, tmp_path: Path) -> None:
    base = tmp_path / f"trivet-{os.geteuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        base.symlink_to("elsewhere")
    else:
        base.mkdir()
        base.chmod(0o777)
    with pytest.raises(SettingsError, match="not a folder of this user's alone"):
        folder.make_folder(tmp_path, "x")
    assert folder.sweep(tmp_path) == []


def test_a_root_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tensors\.directory=.*none: cannot make"):
        folder.make_folder(tmp_path / "none", "x")
    assert folder.sweep(tmp_path / "none") == []
    with pytest.raises(SettingsError, match="No such file"):
        folder.check_room(tmp_path / "none", 1, "x")


def test_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.check_room(tmp_path, 1, "media_gb")
    room = os.statvfs(tmp_path)
    small = os.statvfs_result([4096, 4096, 16384, 15625, 15625, *room[5:]])
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    folder.check_room(tmp_path, 64_000_000, "tensors.media_gb")
    with pytest.raises(SettingsError) as raised:
        folder.check_room(tmp_path, 4_000_000_000, "tensors.media_gb")
    assert str(raised.value).startswith(f"tensors.directory={tmp_path} has 64 MB free, and tensors.media_gb wants 4 GB")
    assert "--shm-size" in str(raised.value)


def test_a_dead_process_takes_no_room(
    tmp_path: Path, other: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was killed with a full cache has to be able to start again, by itself."""
    process, path = other
    (path / "buffer").write_bytes(bytes(64_000))
    room = os.statvfs(tmp_path)

    def free(root: Path) -> os.statvfs_result:
        used = sum(one.stat().st_size for one in root.rglob("*") if one.is_file())
        return os.statvfs_result([1, 1, 100_000, 100_000 - used, 100_000 - used, *room[5:]])

    monkeypatch.setattr(os, "statvfs", free)
    with pytest.raises(SettingsError, match="0.036 MB free"):
        folder.check_room(tmp_path, 64_000, "media_gb")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    folder.check_room(tmp_path, 64_000, "media_gb")
