"""Many requests answered by one engine in one process; run with the engine's python:

    python engine_many.py MODULE REQUESTS.json

REQUESTS.json is a list of requests of the engine protocol. Prints as JSON, last, a list with one object for each:
"events", the progress, and "last", the event that would end the run.
"""

import io
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from bitmill_engine_kit import runner
from bitmill_engine_kit.process import isolate_stdout
from bitmill_engine_kit.protocol import EngineError, EvaluateRequest, EventWriter, QuantizeRequest, parse_request


def main() -> None:
    stdout = isolate_stdout()
    runner._prepare_libraries()
    module = import_module(f"{sys.argv[1]}.__main__")
    operations = {QuantizeRequest: module._quantize, EvaluateRequest: module._evaluate}
    answers = [_run(request, operations) for request in json.loads(Path(sys.argv[2]).read_bytes())]
    stdout.write(json.dumps(answers) + "\n")
    stdout.flush()


def _run(request: dict[str, Any], operations: dict[type, Any]) -> dict[str, Any]:
    written = io.StringIO()
    events = EventWriter(written)
    try:
        parsed = parse_request(json.dumps(request).encode()).request
        events.result(operations[type(parsed)]()(parsed, events))
    except EngineError as error:
        events.error(error)
    except Exception as error:  # noqa: BLE001 (as the engine's own runner has it)
        traceback.print_exc()
        events.error(EngineError("ENGINE_ERROR", f"{type(error).__name__}: {error}"))
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    return {"events": lines[:-1], "last": lines[-1]}


if __name__ == "__main__":
    main()
