"""The cache of remote artifacts: bounded, least recently used first, shared by threads and processes, safe to kill."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from bitmill_common.errors import CancelledError, FailedPreconditionError, ResourceExhaustedError
from bitmill_common.staging import staged_directory
from bitmill_inference.artifacts import artifact_cache
from bitmill_inference.artifacts.artifact_cache import ArtifactCache, CacheEntry

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 30
Usage = namedtuple("Usage", "total used free")


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def ignore(count: int) -> None:
    """The `on_bytes` of a caller that never gives up."""


def writes(size: int) -> Callable[[Path], None]:
    def download(directory: Path) -> None:
        with staged_directory(directory) as staging:
            (staging / "model.safetensors").write_bytes(bytes(size))

    return download


def never(directory: Path) -> None:
    raise AssertionError(f"{directory} is downloaded")


def hold(cache: ArtifactCache, number: int, size: int = 100) -> CacheEntry:
    return cache.hold(digest(number), size, writes(size), ignore)


def cached(cache: ArtifactCache) -> set[int]:
    """The digests in the cache, as `digest` numbers them, and nothing else but whole entries."""
    return {int(path.name, 16) for path in (cache.directory / "artifacts").iterdir()}


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache", 300)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much is free on the disk."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(artifact_cache.shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - free, free))

    return set_free


def test_an_entry_is_downloaded_once(cache: ArtifactCache) -> None:
    """Also while it is held, and by another cache object on the same directory."""
    first = hold(cache, 1)
    second = ArtifactCache(cache.directory).hold(digest(1), 100, never, ignore)
    assert (first.fetched, second.fetched) == (True, False)
    assert first.directory == second.directory
    assert [path.name for path in second.directory.iterdir()] == ["model.safetensors"]


def test_the_least_recently_used_entry_makes_room(cache: ArtifactCache) -> None:
    """Used is what was held, not what was downloaded."""
    for number in (1, 2, 3, 1):
        hold(cache, number).release()
    hold(cache, 4).release()
    assert cached(cache) == {1, 3, 4}
    hold(cache, 5, 200).release()
    assert cached(cache) == {4, 5}
    assert {path.name for path in (cache.directory / "locks").iterdir()} == {f"{n:064x}.lock" for n in (4, 5)}


def test_what_is_in_use_is_never_removed(cache: ArtifactCache) -> None:
    """Neither for room, which then goes to the entry used next, nor when no room can be made: then nothing is."""
    held = hold(cache, 1)
    hold(cache, 2).release()
    other = ArtifactCache(cache.directory).hold(digest(3), 100, writes(100), ignore)
    hold(cache, 4).release()
    assert cached(cache) == {1, 3, 4}
    with pytest.raises(ResourceExhaustedError) as caught:
        cache.hold(digest(5), 200, never, ignore)
    assert caught.value.reason == "CACHE_FULL"
    metadata = caught.value.metadata
    assert (metadata["size_bytes"], metadata["cache_max_bytes"], metadata["in_use_bytes"]) == ("200", "300", "200")
    assert cached(cache) == {1, 3, 4}
    held.release()
    hold(cache, 5, 200).release()
    assert cached(cache) == {3, 5}
    other.release()


def test_what_is_larger_than_the_bound_is_refused_with_numbers_before_a_byte_is_fetched(cache: ArtifactCache) -> None:
    """And nothing is removed for it."""
    hold(cache, 1).release()
    with pytest.raises(ResourceExhaustedError) as caught:
        cache.hold(digest(2), 301, never, ignore)
    assert caught.value.reason == "CACHE_TOO_SMALL"
    assert (caught.value.metadata["size_bytes"], caught.value.metadata["cache_max_bytes"]) == ("301", "300")
    assert cached(cache) == {1}
    assert not (cache.directory / "locks" / f"{2:064x}.lock").exists()


def test_what_is_larger_than_the_free_disk_is_refused_with_numbers(
    cache: ArtifactCache, disk: Callable[[int], None]
) -> None:
    """Whatever the bound allows; what can be removed counts as free."""
    hold(cache, 1).release()
    disk(50)
    with pytest.raises(ResourceExhaustedError) as caught:
        cache.hold(digest(2), 200, never, ignore)
    assert caught.value.reason == "DISK_FULL"
    metadata = caught.value.metadata
    assert (metadata["size_bytes"], metadata["free_bytes"], metadata["available_bytes"]) == ("200", "50", "150")
    assert cached(cache) == {1}
    hold(cache, 2, 150).release()
    assert cached(cache) == {2}


def test_without_a_bound_a_tenth_of_the_room_on_the_disk_stays_free(
    tmp_path: Path, disk: Callable[[int], None]
) -> None:
    """The room is what the cache holds and what is free."""
    cache = ArtifactCache(tmp_path / "cache")
    disk(1000)
    hold(cache, 1, 500).release()
    disk(500)
    hold(cache, 2, 400).release()
    assert cached(cache) == {1, 2}
    disk(100)
    hold(cache, 3, 1).release()
    assert cached(cache) == {2, 3}
    with pytest.raises(ResourceExhaustedError) as caught:
        cache.hold(digest(4), 600, never, ignore)
    assert caught.value.reason == "DISK_FULL"


def test_downloads_of_others_are_counted_before_they_are_there(cache: ArtifactCache) -> None:
    """Two that fit alone, but not together, are not both begun."""
    downloading, proceed = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        downloading.set()
        assert proceed.wait(DEADLINE_S)
        writes(200)(directory)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(cache.hold, digest(1), 200, slow, ignore)
        assert downloading.wait(DEADLINE_S)
        with pytest.raises(ResourceExhaustedError):
            cache.hold(digest(2), 200, never, ignore)
        proceed.set()
        first.result().release()
    hold(cache, 2, 200).release()
    assert cached(cache) == {2}


def test_a_waiter_can_give_up(cache: ArtifactCache) -> None:
    """While another one downloads; what the other downloads is not disturbed."""
    downloading, proceed = threading.Event(), threading.Event()

    def slow(directory: Path) -> None:
        downloading.set()
        assert proceed.wait(DEADLINE_S)
        writes(100)(directory)

    def give_up(count: int) -> None:
        raise CancelledError("LOAD_GIVEN_UP", "given up")

    with ThreadPoolExecutor() as threads:
        first = threads.submit(cache.hold, digest(1), 100, slow, ignore)
        assert downloading.wait(DEADLINE_S)
        with pytest.raises(CancelledError):
            cache.hold(digest(1), 100, never, give_up)
        proceed.set()
        assert first.result().fetched
    assert cached(cache) == {1}


def test_a_failed_download_leaves_nothing(cache: ArtifactCache) -> None:
    """And the next one starts anew."""

    def fail(directory: Path) -> None:
        with staged_directory(directory) as staging:
            (staging / "model.safetensors").write_bytes(b"half")
            raise CancelledError("LOAD_GIVEN_UP", "given up")

    with pytest.raises(CancelledError):
        cache.hold(digest(1), 100, fail, ignore)
    assert [path for path in cache.directory.rglob("*") if path.is_file()] == []
    assert hold(cache, 1).fetched


def test_a_directory_for_one_use_goes_with_its_release(cache: ArtifactCache) -> None:
    """Two of the same name are apart, and neither makes room for others while it is used."""
    first, second = (cache.hold_once("plain", 100, writes(100), ignore) for _ in range(2))
    assert first.directory != second.directory
    with pytest.raises(ResourceExhaustedError):
        cache.hold(digest(1), 200, never, ignore)
    first.release()
    assert not first.directory.exists()
    assert second.directory.exists()
    cache.sweep()
    assert second.directory.exists()
    hold(cache, 1, 200).release()
    second.release()
    assert list((cache.directory / "downloads").iterdir()) == []


def test_a_sweep_leaves_a_download_that_goes_on(cache: ArtifactCache) -> None:
    """Of either kind; its files appear as if nothing had been."""
    for begin in (cache.hold_once, cache.hold):
        downloading, proceed = threading.Event(), threading.Event()

        def slow(
            directory: Path, downloading: threading.Event = downloading, proceed: threading.Event = proceed
        ) -> None:
            with staged_directory(directory) as staging:
                (staging / "model.safetensors").write_bytes(b"whole")
                downloading.set()
                assert proceed.wait(DEADLINE_S)

        with ThreadPoolExecutor() as threads:
            entry = threads.submit(begin, digest(1), 5, slow, ignore)
            assert downloading.wait(DEADLINE_S)
            ArtifactCache(cache.directory).sweep()
            proceed.set()
            assert (entry.result().directory / "model.safetensors").read_bytes() == b"whole"
            entry.result().release()


def test_a_cache_that_was_removed_meanwhile_does_not_fail_a_release(cache: ArtifactCache) -> None:
    """As by somebody who wanted its room."""
    entries = [hold(cache, 1), cache.hold_once("plain", 100, writes(100), ignore)]
    shutil.rmtree(cache.directory)
    for entry in entries:
        entry.release()
    assert hold(cache, 1).fetched


def test_a_damaged_entry_is_removed_unless_somebody_has_replaced_it(cache: ArtifactCache) -> None:
    """Of two that find the damage, the second one does not throw the new download away."""
    first, second = hold(cache, 1), hold(cache, 1)
    cache.discard(first, ignore)
    assert cached(cache) == set()
    assert hold(cache, 1).fetched
    cache.discard(second, ignore)
    assert cached(cache) == {1}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """When it is needed; a server whose models lie on its disk starts without."""
    (tmp_path / "cache").write_text("no directory")
    cache = ArtifactCache(tmp_path / "cache")
    cache.sweep()
    with pytest.raises(FailedPreconditionError) as caught:
        cache.hold(digest(1), 100, never, ignore)
    assert (caught.value.reason, caught.value.metadata["path"]) == ("CACHE_UNUSABLE", str(tmp_path / "cache"))


def test_a_disk_that_is_full_already_is_no_unusable_cache(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a lock can be made then."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact_cache.FileLock, "acquire", fail)
    with pytest.raises(ResourceExhaustedError) as caught:
        hold(cache, 1)
    assert caught.value.reason == "DISK_FULL"


def test_a_cache_that_cannot_take_an_entry_is_named(cache: ArtifactCache) -> None:
    """As when somebody put something else in its place; the others are kept as before."""
    (cache.directory / "artifacts").mkdir(parents=True)
    (cache.directory / "artifacts" / f"{1:064x}").write_text("no directory")
    for _ in range(2):
        with pytest.raises(FailedPreconditionError) as caught:
            hold(cache, 1)
        assert caught.value.reason == "CACHE_UNUSABLE"
    hold(cache, 2).release()


def test_a_sweep_removes_the_locks_of_entries_that_are_gone(cache: ArtifactCache) -> None:
    """Discarded ones and those removed by hand; whoever holds one keeps it."""
    damaged, removed, used = hold(cache, 1), hold(cache, 2), hold(cache, 3)
    cache.discard(damaged, ignore)
    damaged.release()
    removed.release()
    shutil.rmtree(removed.directory)
    shutil.rmtree(used.directory)
    cache.sweep()
    assert [path.name for path in (cache.directory / "locks").iterdir()] == [f"{3:064x}.lock"]
    used.release()
    cache.sweep()
    assert list((cache.directory / "locks").iterdir()) == []


class Holder:
    """A process of tests/support/cache_race.py."""

    def __init__(self, cache: ArtifactCache, number: int, size: int, max_bytes: int | None = None) -> None:
        arguments = {
            "cache": str(cache.directory),
            "digest": digest(number),
            "size": size,
            "max_bytes": max_bytes,
        }
        script = REPOSITORY / "tests/support/cache_race.py"
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Lets its download end, if it is the one that downloads."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Lets it release its entry and end."""
        self.process.communicate(timeout=DEADLINE_S)


@contextmanager
def holders(count: int, cache: ArtifactCache, number: int, size: int) -> Iterator[list[Holder]]:
    started = [Holder(cache, number, size) for _ in range(count)]
    try:
        yield started
    finally:
        for holder in started:
            if holder.process.poll() is None:
                holder.kill()


def test_processes_that_want_one_artifact_download_it_once(cache: ArtifactCache) -> None:
    """The others find it ready, and none removes what any of them uses."""
    with holders(4, cache, 1, 200) as racing:
        for holder in racing:
            holder.go_on()
        said = [[holder.says() for _ in range(2)] for holder in racing]
        for holder, lines in zip(racing, said, strict=True):
            if lines[-1] == "downloading":
                lines.append(holder.says())
        assert sorted(lines[-1] for lines in said) == ["ready False"] * 3 + ["ready True"]
        assert sum("downloading" in lines for lines in said) == 1
        for holder in racing[:3]:
            holder.close()
        with pytest.raises(ResourceExhaustedError):
            cache.hold(digest(2), 200, never, ignore)
        racing[3].close()
    hold(cache, 2, 200).release()
    assert cached(cache) == {2}


def test_a_process_killed_while_it_downloads_hands_over_to_one_that_waits(cache: ArtifactCache) -> None:
    """Its half is swept, its locks died with it."""
    with holders(2, cache, 1, 200) as racing:
        assert [holder.says() for holder in racing] == ["started"] * 2
        with ThreadPoolExecutor() as threads:
            next_lines = [threads.submit(holder.says) for holder in racing]
            done, _ = wait(next_lines, DEADLINE_S, FIRST_COMPLETED)
            downloader = next_lines.index(done.pop())
            racing[downloader].kill()
            assert next_lines[1 - downloader].result(DEADLINE_S) == "downloading"
        (partial,) = (cache.directory / "artifacts").iterdir()
        racing[1 - downloader].go_on()
        assert racing[1 - downloader].says() == "ready True"
        assert not partial.exists()
        assert cached(cache) == {1}


def test_the_next_start_removes_what_a_killed_process_left(cache: ArtifactCache) -> None:
    """The partial download and its locks; what a living process downloads stays."""
    with holders(1, cache, 1, 100) as (dying,), holders(1, cache, 2, 100) as (living,):
        assert [holder.says() for holder in (dying, living, dying, living)] == ["started"] * 2 + ["downloading"] * 2
        assert len(list((cache.directory / "artifacts").iterdir())) == 2
        dying.kill()
        cache.sweep()
        assert len(list((cache.directory / "artifacts").iterdir())) == 1
        living.go_on()
        assert living.says() == "ready True"
        assert cached(cache) == {2}
