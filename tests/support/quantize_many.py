"""Many runs of the llmcompressor engine's `quantize` in one process; run with its python:

    python quantize_many.py REQUESTS.json

REQUESTS.json is a list of requests of the engine protocol. Prints as JSON, last, a list with one object for each: the
result, or {"reason", "message", "metadata"} of the error, and under "events" the progress.
"""

import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from bitmill_engine_kit.process import isolate_stdout
from bitmill_engine_kit.protocol import EngineError, EventWriter, QuantizeRequest, parse_request
from bitmill_engine_llmcompressor.quantize import quantize


def main() -> None:
    stdout = isolate_stdout()
    answers = [_run(request) for request in json.loads(Path(sys.argv[1]).read_bytes())]
    stdout.write(json.dumps(answers) + "\n")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    events = io.StringIO()
    parsed = parse_request(json.dumps(request).encode()).request
    assert isinstance(parsed, QuantizeRequest)
    try:
        answer = quantize(parsed, EventWriter(events))
    except EngineError as error:
        answer = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
    except Exception as error:  # noqa: BLE001 (as the engine's own runner has it)
        traceback.print_exc()
        answer = {"reason": "ENGINE_ERROR", "message": f"{type(error).__name__}: {error}", "metadata": {}}
    return answer | {"events": [json.loads(line) for line in events.getvalue().splitlines()]}


if __name__ == "__main__":
    main()
