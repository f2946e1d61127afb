"""The core of tests/e2e/test_engines.py for a host without the tests' environment; run with the engine's python:

    python try_engine.py MODULE CHECKPOINT DIRECTORY

CHECKPOINT is one that make_tiny_checkpoints.py made, DIRECTORY a new one for what the engine makes. Prints the answers
as JSON, and ends with status 1 when one is not as it must be.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.llmcompressor_engine import evaluate_request, quantize_request

AS_IT_IS = {"scheme": "UNQUANTIZED", "algorithm": "NONE", "group_size": 0, "symmetric": True}


def main() -> None:
    module, checkpoint, directory = sys.argv[1], Path(sys.argv[2]).absolute(), Path(sys.argv[3]).absolute()
    directory.mkdir(parents=True)
    recipes: dict[str, dict[str, Any]] = {
        "none": {},
        "static": {"activation_order": "STATIC"},
        "again": {"activation_order": "STATIC"},
        "channel": {"scheme": "W8A16", "group_size": -1, "activation_order": "STATIC"},
        "rule": {"rules": [{"pattern": "re:.*down_proj", **AS_IT_IS}]},
        "awq": {"algorithm": "AWQ"},
    }
    answers = {}
    for name, recipe in recipes.items():
        answers[name] = _run(module, quantize_request(checkpoint, directory / name, **recipe), directory)
    for name in ("static", "channel", "rule"):
        answers[f"evaluate {name}"] = _run(module, evaluate_request(checkpoint, directory / name), directory)
    faults = list(_faults(answers, directory))
    print(json.dumps({"faults": faults, "answers": answers}, indent=1))
    sys.exit(bool(faults))


def _run(module: str, request: dict[str, Any], directory: Path) -> dict[str, Any]:
    path = directory / "request.json"
    path.write_text(json.dumps(request))
    done = subprocess.run([sys.executable, "-m", module, path], cwd=directory, capture_output=True, text=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    if not events:
        return {"exit_status": done.returncode, "stderr": done.stderr[-3000:]}
    answer = {"exit_status": done.returncode, "progress": events[:-1], "last": events[-1]}
    return answer | ({"stderr": done.stderr[-3000:]} if events[-1].get("reason") == "ENGINE_ERROR" else {})


def _faults(answers: dict[str, dict[str, Any]], directory: Path) -> list[str]:
    faults = []
    for name, answer in answers.items():
        last = answer.get("last", {})
        right = last.get("reason") == "UNSUPPORTED_RECIPE" if name == "awq" else last.get("event") == "result"
        if not right or answer["exit_status"] != (name == "awq"):
            faults.append(f"{name}: {last.get('reason')} {last.get('message')}")
    if not faults:
        same = all(
            path.read_bytes() == (directory / "again" / path.name).read_bytes()
            for path in (directory / "static").iterdir()
        )
        faults += [] if same else ["the same request gave other bytes"]
        counts = {name: answers[name]["last"]["num_quantized_modules"] for name in ("none", "channel", "rule")}
        faults += [] if counts == {"none": 14, "channel": 14, "rule": 12} else [f"quantized {counts}"]
    return faults


if __name__ == "__main__":
    main()
