"""Notes that the files of a directory were compared with a digest, good for as long as no file changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from bitmill_common.errors import BitmillError
from bitmill_common.local_store import real_path
from bitmill_common.staging import staged_file

log = structlog.get_logger("bitmill.models")

# A file that is changed twice within one tick of the file system's clock has the same times after both; ticks of
# Linux's file systems take 10 ms at most.
_TICK_S = 0.02

FileState = Mapping[str, Sequence[int]]
"""By path: device, inode, size in bytes, and the times of the last change of content and of status, in ns."""


def read_state(files: Mapping[str, Path]) -> FileState:
    """Returns the state of files, given by their path inside the directory; links are followed.

    Those that are not there are left out.
    """
    state = {}
    for path, file in files.items():
        with contextlib.suppress(FileNotFoundError):
            status = file.stat()
            state[path] = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    return state


def wait_out_tick(state: FileState) -> None:
    """Returns once a further change of the files would show in their times."""
    newest = max((times[-1] for times in state.values()), default=0) / 1e9
    age = time.time() - newest
    if age < _TICK_S:
        time.sleep(min(_TICK_S - age, _TICK_S))


class Stamps:
    """Stamps of directories, one file each below `directory`, which is made when it is needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def matches(self, model: Path, digest: str, state: FileState) -> bool:
        """Whether the files of the directory `model`, all of them, had this very state when the digest was theirs."""
        try:
            stamp = json.loads(self._path(model).read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(stamp, dict) and stamp.get("digest") == digest and stamp.get("files") == dict(state)

    def write(self, model: Path, digest: str, state: FileState) -> None:
        """Notes that the files had the digest. Where nothing can be written, they are compared again next time."""
        stamp = {"directory": os.fspath(real_path(model)), "digest": digest, "files": dict(state)}
        try:
            with staged_file(self._path(model)) as writer:
                writer.write(json.dumps(stamp).encode())
        except (OSError, BitmillError) as error:
            log.warning("stamp_not_written", directory=str(model), error=str(error))

    def remove(self, model: Path) -> None:
        """Forgets a directory."""
        self._path(model).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Forgets directories that are no longer there."""
        for path in self._directory.glob("*.json"):
            try:
                gone = not Path(json.loads(path.read_bytes())["directory"]).is_dir()
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                gone = True
            if gone:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    log.warning("stamp_not_removed", path=str(path), error=str(error))

    def _path(self, model: Path) -> Path:
        return self._directory / f"{hashlib.sha256(os.fsencode(real_path(model))).hexdigest()}.json"
