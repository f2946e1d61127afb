"""Runs the real llmcompressor engine as its protocol says, and reads what it answers."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MODULE = "bitmill_engine_llmcompressor"
DEADLINE_S = 120

Event = dict[str, Any]


@dataclass(frozen=True)
class EngineRun:
    """A finished run: every event, the exit status, and what the libraries printed."""

    events: list[Event]
    exit_status: int
    stderr: str

    @property
    def last(self) -> Event:
        assert self.events, self.stderr
        return self.events[-1]

    @property
    def progress(self) -> list[Event]:
        return self.events[:-1]


def quantize_request(source_dir: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """A request that the tiny checkpoints take; `changes` override fields of the recipe and the calibration."""
    recipe = {
        "scheme": "W4A16",
        "algorithm": "GPTQ",
        "group_size": 32,
        "symmetric": True,
        "activation_order": "NONE",
        "ignore": ["lm_head"],
        "rules": [],
        "kv_cache": None,
        "smoothing_strength": 0,
        "adaptive": None,
        "dampening_frac": 0.01,
        "seed": 0,
    }
    calibration = {"path": None, "packing": "CONCATENATE", "num_samples": 16, "max_sequence_length": 128}
    unknown = changes.keys() - recipe.keys() - calibration.keys()
    assert not unknown, unknown
    return {
        "protocol_version": 2,
        "operation": "quantize",
        "source_dir": str(source_dir),
        "output_dir": str(output_dir),
        "recipe": {key: changes.get(key, value) for key, value in recipe.items()},
        "calibration": {key: changes.get(key, value) for key, value in calibration.items()},
    }


def evaluate_request(source_dir: Path, model_dir: Path, num_tokens: int = 700, window: int = 256) -> dict[str, Any]:
    return {
        "protocol_version": 2,
        "operation": "evaluate",
        "source_dir": str(source_dir),
        "model_dir": str(model_dir),
        "num_tokens": num_tokens,
        "window": window,
    }


def command(python: Path, request: dict[str, Any], directory: Path) -> list[str]:
    """The command line for a request, whose file it writes to `directory`."""
    path = directory / f"{request['operation']}.json"
    path.write_text(json.dumps(request))
    return [str(python), "-m", MODULE, str(path)]


def run_engine(python: Path, request: dict[str, Any], directory: Path) -> EngineRun:
    """Run a request to its end."""
    done = subprocess.run(
        command(python, request, directory), cwd=directory, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return EngineRun([json.loads(line) for line in done.stdout.splitlines()], done.returncode, done.stderr)


def read_until(stream: IO[bytes], wanted: bytes | None) -> bytes:
    """Read until `wanted` has come, or to the end with None; fails when nothing comes within the deadline."""
    seen = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while wanted is None or wanted not in seen:
            assert selector.select(DEADLINE_S), f"nothing within {DEADLINE_S} s after {seen!r}"
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                assert wanted is None, f"the stream ended with {seen!r}"
                break
            seen += piece
    return seen
