"""The life of an engine process: `python -m <engine> REQUEST.json`, events on standard output.

Exit status 0 after a result event, 1 after an error event; anything else is a crash.
"""

import argparse
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitmill_engine_kit.process import end_with_parent, isolate_stdout, usable_cores
from bitmill_engine_kit.protocol import EngineError, EventWriter, Request, parse_request

Operation = Callable[[Any, EventWriter], dict[str, Any]]
"""Does what a request asks for and returns the fields of the result event."""


def run(engine: str, operations: Mapping[type[Request], Callable[[], Operation]]) -> int:
    """Run the request that the command line names and return the exit status.

    `operations` maps a kind of request to a function that imports and returns what does it: torch takes seconds to
    import, and reads the variables that are set here when it is imported.
    """
    end_with_parent()
    parser = argparse.ArgumentParser(prog=f"python -m {engine}", description=__doc__)
    parser.add_argument("request", type=Path, help="the request as a JSON file")
    path = parser.parse_args().request
    events = EventWriter(isolate_stdout())
    try:
        result = _run(path, operations, events)
    except EngineError as error:
        failure = error
    # The one place that every failure of the libraries passes, out of memory included: the parent gets them all alike.
    except Exception as error:  # noqa: BLE001
        failure = EngineError("ENGINE_ERROR", f"{type(error).__name__}: {error}", exception=type(error).__name__)
        traceback.print_exc()
    else:
        events.result(result)
        return 0
    events.error(failure)
    return 1


def _run(
    path: Path, operations: Mapping[type[Request], Callable[[], Operation]], events: EventWriter
) -> dict[str, Any]:
    envelope = parse_request(path.read_bytes())
    if envelope.parent_pid not in (None, os.getppid()):
        # It died before this process asked to die with it.
        raise EngineError("PARENT_GONE", f"process {envelope.parent_pid} is no longer the parent")
    if (load := operations.get(type(envelope.request))) is None:
        raise EngineError("REQUEST_INVALID", "this engine has no such operation", field="request.operation")
    _prepare_libraries()
    return load()(envelope.request, events)


def _prepare_libraries() -> None:
    """Keep the libraries off the network and on the cores that this process has.

    Threads that wait sleep: by default they spin, and on a host whose cores are busy with other work, the inference
    server's for example, that has been measured to take three times as long.
    """
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
