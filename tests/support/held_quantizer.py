"""The real quantizer server, except that one phase stops for ever, so that a test can kill the server in it.

`python held_quantizer.py PHASE before|after PIPE FLAGS...`: before the phase does its work, or after it did and before
that is recorded. Opening the named pipe PIPE for reading waits for that moment.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from bitmill_quantizer import __main__ as quantizer
from bitmill_quantizer.jobs import fetching, pipeline, publishing

FUNCTIONS = {
    "RESOLVE": (fetching, "resolve"),
    "FETCH": (fetching, "fetch"),
    "PREFLIGHT": (pipeline, "check"),
    "QUANTIZE": (pipeline, "quantize"),
    "EVALUATE": (pipeline, "evaluate"),
    "SAVE": (publishing, "save"),
    "VERIFY": (pipeline, "verify"),
    "UPLOAD": (publishing, "upload"),
    "PUBLISH": (publishing, "publish"),
}


def hold(phase: str, when: str, pipe: Path) -> None:
    """Replaces the phase's function by one that stops."""
    module, name = FUNCTIONS[phase]
    work = getattr(module, name)

    def held(*args: Any) -> Any:
        if when == "after":
            work(*args)
        pipe.open("w").close()
        threading.Event().wait()

    setattr(module, name, held)


def main() -> None:
    """Runs the server."""
    phase, when, pipe = sys.argv[1:4]
    del sys.argv[1:4]
    hold(phase, when, Path(pipe))
    quantizer.main()


if __name__ == "__main__":
    main()
