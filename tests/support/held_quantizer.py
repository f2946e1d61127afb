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
from bitmill_quantizer.jobs import pipeline

FUNCTIONS = {
    "RESOLVE": "resolve",
    "FETCH": "fetch",
    "PREFLIGHT": "check",
    "QUANTIZE": "quantize",
    "EVALUATE": "evaluate",
    "SAVE": "save",
    "VERIFY": "verify",
    "UPLOAD": "upload",
    "PUBLISH": "publish",
}


def hold(phase: str, when: str, pipe: Path) -> None:
    """Replaces the phase's function by one that stops."""
    work = getattr(pipeline, FUNCTIONS[phase])

    def held(*args: Any) -> Any:
        if when == "after":
            work(*args)
        pipe.open("w").close()
        threading.Event().wait()

    setattr(pipeline, FUNCTIONS[phase], held)


def main() -> None:
    """Runs the server."""
    phase, when, pipe = sys.argv[1:4]
    del sys.argv[1:4]
    hold(phase, when, Path(pipe))
    quantizer.main()


if __name__ == "__main__":
    main()
