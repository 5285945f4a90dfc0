"""A file is looked at as memory only while nobody can cut it short.

Damage shown: a process that ends by a signal because a file was cut short while it was looked at; a writer
that waits for ever; bytes from elsewhere in the file.
"""

import ctypes
import os
import subprocess
import sys
import time

import pytest

from weightload import mapped
from weightload.mapped import Mapped

SIZE = 3 << 20


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(SIZE))
    return file


@pytest.fixture
def handle(path):
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


@pytest.fixture
def looked(handle):
    found = Mapped.of(handle, SIZE)
    if found is None:
        pytest.skip("this system, or its file system, has no leases")
    yield found
    found.close()


def cutter(path):
    """Start a process that cuts the file short, and says so."""
    code = "import sys; f = open(sys.argv[1], 'r+b'); f.truncate(0); print('cut', flush=True)"
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)


def ended(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@pytest.mark.parametrize("span", [(0, SIZE), (1, 4097), (4095, 4096), (SIZE - 1, SIZE)])
def test_what_is_looked_at_is_the_file(looked, path, span):
    begin, end = span
    assert looked.holds(begin, end)
    assert ctypes.string_at(looked.address + begin, end - begin) == path.read_bytes()[begin:end]


def test_a_writer_waits_until_the_file_is_let_go_and_is_noticed(looked, path):
    writer = cutter(path)
    try:
        until = time.monotonic() + 20
        while looked.holds(0, SIZE) and time.monotonic() < until:
            time.sleep(0.01)
        assert not looked.holds(0, SIZE)
        assert not ended(writer, 0.3)
        assert ctypes.string_at(looked.address + SIZE - 1, 1) == path.read_bytes()[-1:]
        looked.close()
        assert ended(writer, 20)
    finally:
        writer.kill()
        writer.wait()
    assert path.stat().st_size == 0


def test_what_is_not_in_memory_is_not_looked_at(looked, handle):
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass  # it would have to wait for the disk
    else:
        pytest.skip("the file cannot be dropped from memory here")
    assert not looked.holds(0, SIZE)
    os.pread(handle, SIZE, 0)
    assert looked.holds(0, SIZE)


def test_a_file_that_somebody_writes_is_not_mapped(path):
    with path.open("r+b"):
        number = os.open(path, os.O_RDONLY)
        assert Mapped.of(number, SIZE) is None
        os.close(number)


def test_a_system_that_lets_writers_wait_for_too_short_is_not_trusted(
    handle, tmp_path, monkeypatch
):
    for text in ("4", "no number"):
        (tmp_path / "time").write_text(text)
        monkeypatch.setattr(mapped, "_BREAK_TIME", tmp_path / "time")
        assert Mapped.of(handle, SIZE) is None
    monkeypatch.setattr(mapped, "_BREAK_TIME", tmp_path / "nowhere")
    assert Mapped.of(handle, SIZE) is None


def test_a_file_system_that_others_share_is_not_trusted(handle, tmp_path, monkeypatch):
    device = os.fstat(handle).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(mapped, "_MOUNTS", mounts)
    for kind in ("nfs4", "fuse.sshfs", "overlay"):
        mounts.write_text(f"36 35 {number} / /data rw shared:1 - {kind} there rw\n")
        assert Mapped.of(handle, SIZE) is None
    mounts.write_text("36 35 999:999 / /data rw - ext4 /dev/x rw\n")
    assert Mapped.of(handle, SIZE) is None
