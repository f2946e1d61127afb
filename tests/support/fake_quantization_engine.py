"""A quantization engine without torch: speaks the engine protocol and does as a file tells it.

`install` makes an interpreter that runs it whatever module it is given. `behave` says what the operations do:

succeed  three events of progress, then a model directory or an evaluation
refuse   an error event
crash    a line on standard error, then exit status 3
die      SIGKILL by itself, as when memory runs out
babble   a line that is no event
hang     one event of progress, a child of its own, then nothing until it is ended; `stubborn` ignores SIGTERM too
wait     one event of progress, then nothing until the test opens the gate; then as succeed
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import processes
from support.checkpoints import write_safetensors

PR_SET_PDEATHSIG = 1


def install(directory: Path) -> Path:
    """Writes the interpreter to give to EngineProcess, and returns it. `directory` also takes the control files."""
    directory.mkdir(parents=True, exist_ok=True)
    python = directory / "python"
    tests = Path(__file__).parents[1]
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.path.insert(0, {str(tests)!r})\n"
        "from pathlib import Path\n"
        "from support import fake_quantization_engine as engine\n"
        f"sys.exit(engine.run(Path(sys.argv[-1]), Path({str(directory)!r})))\n"
    )
    python.chmod(0o755)
    os.mkfifo(directory / "gate")
    return python


def behave(directory: Path, **behaviours: str) -> None:
    """Says what the operations do from now on: `behave(directory, quantize="hang")`."""
    (directory / "behaviour.json").write_text(json.dumps(behaviours))


def open_gate(directory: Path) -> None:
    """Lets an engine that waits at the gate go on; blocks until one is there."""
    with (directory / "gate").open("w"):
        pass


def pids(directory: Path) -> list[int]:
    """Returns the process ids of every engine that ran, their children included."""
    path = directory / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def all_end(directory: Path) -> bool:
    """Waits until every one of `pids` has ended, and returns whether they have."""
    return all(processes.ends(pid) for pid in pids(directory))


def run(request_path: Path, directory: Path) -> int:
    """Is the engine. Returns its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(request_path.read_text())
    if os.getppid() != request["parent_pid"]:
        return 1
    _note_pid(directory, os.getpid())
    path = directory / "behaviour.json"
    behaviours = json.loads(path.read_text()) if path.exists() else {}
    match behaviours.get(request["operation"], "succeed"):
        case "refuse":
            _emit("error", reason="TOO_FEW_SAMPLES", message="the text has 3 samples", metadata={"num_samples": "3"})
            return 1
        case "crash":
            print("RuntimeError: out of luck", file=sys.stderr)
            return 3
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "babble":
            print("loading weights...", flush=True)
        case "hang" | "stubborn" as behaviour:
            _hang(request["operation"], directory, stubborn=behaviour == "stubborn")
        case "wait":
            _progress(request["operation"], 1)
            with (directory / "gate").open():
                pass
    return _succeed(request)


def _hang(operation: str, directory: Path, *, stubborn: bool) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    _note_pid(directory, child.pid)
    _progress(operation, 1)
    while True:
        signal.pause()


def _succeed(request: dict[str, Any]) -> int:
    operation = request["operation"]
    for completed in range(1, 4):
        _progress(operation, completed)
    if operation == "quantize":
        _write_model(request)
        _emit(
            "result",
            versions={"fake-engine": "1.0"},
            format="compressed-tensors",
            calibration={
                "digest": f"sha256:{'c' * 64}",
                "num_samples": 4,
                "num_tokens": 64,
                "num_documents": 2,
                "uncalibrated_modules": [],
            },
            modules=_modules(request["recipe"]),
            sensitivities=_sensitivities(request["recipe"]),
            num_quantized_modules=0 if _passes_through(request["recipe"]) else 14,
            peak_memory_bytes=1_000_000,
            peak_device_memory_bytes=2_000_000,
        )
    elif operation == "verify":
        _emit("result", text=" Paris.", num_tokens=16, device="cpu", versions={"fake-vllm": "2.0"}, skipped="")
    else:
        _emit(
            "result",
            source_perplexity=10.0,
            artifact_perplexity=10.5,
            mean_kl_divergence=0.02,
            p99_kl_divergence=0.2,
            top1_agreement=0.9,
            layer_losses=[{"layer": "model.layers.0", "relative_error": 0.01}],
            num_tokens=request["num_tokens"],
            peak_memory_bytes=3_000_000,
        )
    return 0


def _passes_through(recipe: dict[str, Any]) -> bool:
    return recipe["scheme"] == "UNQUANTIZED" and not recipe["rules"]


def _modules(recipe: dict[str, Any]) -> list[dict[str, object]]:
    """A row for the recipe itself, or the first of ADAPTIVE's candidates, and one for each rule."""
    own = recipe["adaptive"]["candidates"][0] if recipe["adaptive"] else recipe
    return [
        {
            "name": f"model.layers.{index}.mlp.up_proj",
            "scheme": each["scheme"],
            "group_size": each["group_size"],
            "loss": 0.5,
            "dampening_frac": 0.1,
            "remark": "its Hessian did not invert",
        }
        for index, each in enumerate([own, *recipe["rules"]])
    ]


def _sensitivities(recipe: dict[str, Any]) -> list[dict[str, object]]:
    return [
        {
            "modules": ["model.layers.0.mlp.up_proj"],
            "scheme": each["scheme"],
            "group_size": each["group_size"],
            "kl_divergence": 0.25,
            "size_bytes": 1000,
            "chosen": index == 0,
        }
        for index, each in enumerate(recipe["adaptive"]["candidates"] if recipe["adaptive"] else [])
    ]


def _write_model(request: dict[str, Any]) -> None:
    source, output = Path(request["source_dir"]), Path(request["output_dir"])
    output.mkdir()
    is_gguf = source.is_file() and source.suffix == ".gguf"
    config = {"architectures": ["LlamaForCausalLM"]} if is_gguf else json.loads((source / "config.json").read_text())
    if not _passes_through(request["recipe"]) or request["recipe"]["kv_cache"]:
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (output / "config.json").write_text(json.dumps(config))
    if is_gguf:
        (output / "tokenizer.json").write_text("{}")
    else:
        shutil.copy(source / "tokenizer.json", output)
    # Deterministic, and another content for another recipe.
    seed = int(hashlib.sha256(json.dumps(request["recipe"], sort_keys=True).encode()).hexdigest()[:8], 16)
    write_safetensors(output / "model.safetensors", {"model.layers.0.weight": (32, 32)}, seed=seed)


def _progress(operation: str, completed: int) -> None:
    unit = "layers" if operation == "quantize" else "tokens"
    loss = {"loss": 0.5 / completed} if operation == "quantize" else {}
    _emit("progress", phase=operation, completed=completed, total=3, unit=unit, **loss)


def _emit(event: str, **fields: object) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps({"event": event, **fields}), flush=True)


def _note_pid(directory: Path, pid: int) -> None:
    with (directory / "pids").open("a") as writer:
        writer.write(f"{pid}\n")
