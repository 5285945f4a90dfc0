"""Memory that two processes share: whose it is, whether its owner lives, and what is left of it.

Taken for alive, an owner that has ended blocks the next one; taken for another's file, it would be read
as weights; and what is not given back stays in the machine's memory until it is started again.
"""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightload import TransportError
from weightload import arena as home
from weightload.arena import Arena


def handles():
    """Return the arenas that this process has open."""
    gc.collect()
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sorted(
        name
        for name in (os.readlink(link) for link in links if link.is_symlink())
        if "/weightload-" in name
    )


@pytest.fixture
def made(monkeypatch):
    """Return the files that are made in this test."""
    paths = []
    make = home.tempfile.mkstemp

    def mkstemp(*args, **kwargs):
        handle, path = make(*args, **kwargs)
        paths.append(path)
        return handle, path

    monkeypatch.setattr(home.tempfile, "mkstemp", mkstemp)
    return paths


def test_both_sides_of_an_arena_see_the_same_bytes():
    mine = Arena.create(1000)
    try:
        assert mine.memory.numel() == 1024
        other = Arena.open(mine.path, mine.memory.numel(), mine.token)
        mine.memory.copy_(torch.arange(1024) % 251)
        assert torch.equal(other.memory, mine.memory)
        assert other.owner_lives()
        mine.unlink()
        assert not Path(mine.path).exists(), "nothing would be left of an owner that is killed now"
        mine.memory.fill_(5)
        assert bool((other.memory == 5).all()), "and both still see the same"
    finally:
        mine.close(remove=True)
    assert not other.owner_lives()
    with pytest.raises(TransportError, match="cannot be opened"):
        Arena.open(mine.path, 1024, mine.token)


def test_an_arena_that_nothing_has_room_for_is_an_error_and_no_crash():
    """Memory that is promised and is not there would end the process at the first write."""
    with pytest.raises(OSError, match=r"space|large|memory"):
        Arena.create(1 << 50)


def test_another_file_of_the_same_name_is_not_taken_for_the_senders():
    """Two containers may have a file of one name each."""
    mine = Arena.create(64)
    try:
        with pytest.raises(TransportError, match="see different files"):
            Arena.open(mine.path, 64, "0" * 64)
        with pytest.raises(TransportError, match="see different files"):
            Arena.open(mine.path, 128, mine.token)
    finally:
        mine.close(remove=True)


def test_an_owner_that_is_killed_is_not_taken_for_alive():
    program = (
        "import sys, time; from weightload.arena import Arena; a = Arena.create(64);"
        "print(a.path, a.token, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        path, token = owner.stdout.readline().decode().split()
        arena = Arena.open(path, 64, token)
        try:
            assert arena.owner_lives()
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            os.unlink(path)
    assert not arena.owner_lives()


FORKS = """
import os, sys, time
from weightload.arena import Arena
arena = Arena.create(64)
ready, say = os.pipe()
child = os.fork()
if not child:
    os.write(say, b"1")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
print(arena.path, arena.token, child, flush=True)
time.sleep(60)
"""


def test_an_owner_that_has_forked_is_not_taken_for_alive_because_its_child_is():
    """Data loaders fork: a child that outlives its parent holds all that the parent had open."""
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE) as owner:
        path, token, child = owner.stdout.readline().decode().split()
        try:
            arena = Arena.open(path, 64, token)
            assert arena.owner_lives()
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            os.kill(int(child), 0)  # raises if it has ended as well
            assert not arena.owner_lives()
        finally:
            os.kill(int(child), signal.SIGKILL)
            os.unlink(path)


def test_a_child_that_ends_takes_nothing_from_its_parent():
    mine = Arena.create(64)
    other = Arena.open(mine.path, 64, mine.token)
    child = os.fork()
    if not child:
        mine.close(remove=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(mine.path).exists()
    assert other.owner_lives()
    mine.close(remove=True)
    assert not other.owner_lives()
    other.close()


def fails(error):
    def raises(*args, **kwargs):
        raise error

    return raises


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("mmap: cannot allocate memory"), OSError),
        (OSError("no"), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["torch", "system", "interrupted"],
)
def test_what_fails_half_way_leaves_no_file_and_no_handle(error, raised, made, monkeypatch):
    mine = Arena.create(64)
    try:
        before = handles()
        monkeypatch.setattr(home.torch, "from_file", fails(error))
        with pytest.raises(raised):
            Arena.create(64)
        assert len(made) > 1
        assert [path for path in made if os.path.exists(path)] == [mine.path]
        assert handles() == before
        with pytest.raises(TransportError if raised is OSError else raised):
            Arena.open(mine.path, 64, mine.token)
        assert handles() == before
    finally:
        mine.close(remove=True)


def test_a_machine_without_a_folder_that_can_be_written_is_told_so(monkeypatch):
    monkeypatch.setattr(home.os, "access", lambda *_: False)
    with pytest.raises(OSError, match="/dev/shm"):
        Arena.create(64)


@pytest.mark.parametrize(
    ("path", "nbytes", "token"),
    [
        (5, 64, "x"),
        (None, 64, "x"),
        ("/dev/null", "64", "x"),
        ("/dev/null", -64, ""),
        ("/dev/null", 0, "x"),
        ("/dev/null", True, "x"),
        ("/dev/null", 64.0, "x"),
        ("/dev/null", 64, None),
        ("/dev/null", 64, "x"),
        ("/dev", 64, "x"),
        ("/nowhere", 64, "x"),
        ("a\0b", 64, "x"),
        ("/dev/null", 2**70, "x"),
    ],
)
def test_a_place_that_cannot_be_one_is_refused_as_such(path, nbytes, token):
    """What is said of the memory comes from another process."""
    before = handles()
    with pytest.raises(TransportError, match="memory"):
        Arena.open(path, nbytes, token)
    assert handles() == before


def test_an_arena_that_is_kept_to_the_end_ends_without_a_word():
    """What it needs to let go may be gone already when the interpreter goes down."""
    program = (
        "import weightload.arena as home; home.kept = home.Arena.create(64); home.kept.unlink()"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, check=True
    )
    assert ended.stderr == b""


def test_the_handle_of_a_forgotten_arena_is_closed():
    before = handles()
    arena = Arena.create(64)
    arena.unlink()
    assert handles() != before
    del arena
    gc.collect()
    assert handles() == before
