"""Where the short-lived files of a server are, and that none outlives it for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bitmill_inference.vllm.runtime_directory import runtime_directory

DEADLINE_S = 30
HOLD = """
import sys, time
from pathlib import Path
from bitmill_inference.vllm.runtime_directory import runtime_directory
with runtime_directory(Path(sys.argv[1])) as directory:
    (directory / "socket").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_it_goes_with_the_server(tmp_path: Path) -> None:
    """Whatever is in it, and whatever the server ends with."""

    def serve() -> None:
        with runtime_directory(tmp_path) as directory:
            (directory / "socket").touch()
            raise ValueError("end")

    with pytest.raises(ValueError, match="end"):
        serve()
    assert list(tmp_path.iterdir()) == []


def test_two_servers_have_one_each(tmp_path: Path) -> None:
    """The second leaves the first one's alone."""
    with runtime_directory(tmp_path) as first, runtime_directory(tmp_path) as second:
        assert {first, second} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """Nothing else does, however alike its name is."""
    (tmp_path / ".bitmill-run-notes").write_text("mine")
    (tmp_path / ".bitmill-run-cache" / "artifacts").mkdir(parents=True)
    (tmp_path / ".bitmill-run-abcdefgh" / "artifacts").mkdir(parents=True)
    others = {path.name for path in tmp_path.iterdir()}
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    left = Path(holder.stdout.readline().strip())
    holder.kill()
    holder.communicate(timeout=DEADLINE_S)
    assert [path.name for path in left.iterdir()] == ["socket"]
    with runtime_directory(tmp_path) as directory:
        assert {path.name for path in tmp_path.iterdir()} == {*others, directory.name}


def test_a_socket_in_it_has_a_path_that_fits(tmp_path: Path) -> None:
    """Of which vLLM's name takes 37 bytes, and the kernel takes 107."""
    with runtime_directory(tmp_path) as directory:
        assert len(directory.name) + 37 + len("/tmp/") <= 107
