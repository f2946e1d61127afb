"""The real inference server in a process of its own: vLLM on the CPU behind a loopback socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bitmill.inference.v1 import inference_service_pb2_grpc, model_pb2, model_service_pb2, model_service_pb2_grpc

SERVICE = "bitmill.inference.v1.InferenceService"
# An engine starts in half a minute on two cores, and shares them with whatever else runs.
LOAD_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60
ENGINE_OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 16}


class InferenceProcess:
    """A server, its log, and stubs on it."""

    def __init__(
        self,
        python: Path,
        roots: Sequence[Path],
        cache_dir: Path,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        self._process = subprocess.Popen(
            [
                python,
                *("-m", "bitmill_inference", "--address", "127.0.0.1:0", "--cache-dir", cache_dir),
                *("--model-roots", ",".join(root.as_uri() for root in roots)),
                *flags,
            ],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.log: list[str] = []
        self._log_changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self.address = str(self.wait_for_event("server_started")["address"])
        self.channel = grpc.insecure_channel(self.address)
        self.inference = inference_service_pb2_grpc.InferenceServiceStub(self.channel)
        self.models = model_service_pb2_grpc.ModelServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def load(self, name: str, checkpoint: Path, **options: Any) -> model_pb2.Model:
        """Loads a directory and returns its model, serving."""
        request = model_service_pb2.LoadModelRequest(
            name=name, uri=checkpoint.as_uri(), engine_options=model_pb2.EngineOptions(**ENGINE_OPTIONS | options)
        )
        return self.models.LoadModel(request, timeout=LOAD_TIMEOUT_S).model

    def unload(self, name: str) -> None:
        self.models.UnloadModel(model_service_pb2.UnloadModelRequest(name=name), timeout=STOP_TIMEOUT_S)

    def get(self, name: str) -> model_pb2.Model:
        return self.models.GetModel(model_service_pb2.GetModelRequest(name=name)).model

    def is_serving(self, name: str) -> bool:
        """What the health service says about a model."""
        answer = self._health.Check(health_pb2.HealthCheckRequest(service=f"{SERVICE}/{name}"))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def children(self) -> set[psutil.Process]:
        """Every process below the server, zombies too: its engines, their workers, and Python's own helpers."""
        return set(psutil.Process(self.pid).children(recursive=True))

    def engine_cores(self) -> set[psutil.Process]:
        """The engine core of each engine."""
        return {child for child in self.children() if "EngineCore" in child.name()}

    def wait_for_event(self, event: str, timeout_s: float = 120) -> dict[str, Any]:
        """Returns the first log line of that event, once it is there."""
        return dict(json.loads(self.wait_for_lines(f'"event": "{event}"', 1, timeout_s)[0]))

    def wait_for_lines(self, text: str, count: int, timeout_s: float = 120) -> list[str]:
        """Returns the log lines that hold a text, once there are that many."""
        with self._log_changed:
            self._log_changed.wait_for(lambda: self._ended() or len(self._lines(text)) >= count, timeout_s)
        lines = self._lines(text)
        assert len(lines) >= count, f"{text} is not {count} times in the log:\n" + "\n".join(self.log[-50:])
        return lines

    def terminate(self) -> None:
        """Sends SIGTERM and returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the server as the kernel does when memory runs out."""
        self._process.kill()

    def wait(self) -> int:
        """Returns the exit status, once the server has ended."""
        self.channel.close()
        status = self._process.wait(STOP_TIMEOUT_S)
        self._reader.join(STOP_TIMEOUT_S)
        return status

    def _lines(self, text: str) -> list[str]:
        return [line for line in self.log if text in line]

    def _ended(self) -> bool:
        return self._process.poll() is not None

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._append(line.rstrip("\n"))
        self._append("(the log has ended)")

    def _append(self, line: str) -> None:
        with self._log_changed:
            self.log.append(line)
            self._log_changed.notify_all()


def outliving(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Returns those that still run after they had time to end; a zombie does not run."""
    _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT_S)
    return [process for process in alive if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
