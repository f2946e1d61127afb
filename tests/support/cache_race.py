"""A process that holds one artifact of a cache, for tests that race several or kill one. Arguments: a JSON object.

Says on standard output "started", "downloading" when it is the one that downloads, and "ready <fetched>"; ends at the
end of its standard input. A download writes half of the file, waits for a line of standard input and writes the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bitmill_common.staging import staged_directory
from bitmill_inference.artifacts.artifact_cache import ArtifactCache


def main() -> None:
    arguments = json.loads(sys.argv[1])
    cache = ArtifactCache(Path(arguments["cache"]), arguments.get("max_bytes"))
    size = arguments["size"]

    def download(directory: Path) -> None:
        with staged_directory(directory) as staging, (staging / "model.safetensors").open("wb") as writer:
            writer.write(bytes(size // 2))
            writer.flush()
            say("downloading")
            sys.stdin.readline()
            writer.write(bytes(size - size // 2))

    say("started")
    entry = cache.hold(arguments["digest"], size, download, lambda count: None)
    say(f"ready {entry.fetched}")
    sys.stdin.read()
    entry.release()


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
