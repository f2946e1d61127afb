"""`bitmill models` against a real server: what it sends, prints and exits with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.model_pb2 import (
    Adapter,
    EngineOptions,
    LoadPhase,
    LoadProgress,
    Model,
    ModelError,
    ModelLoad,
    ModelState,
)
from support.cli import bitmill
from support.fake_services import FakeServer, Hang

URI = "s3://bucket/artifacts/m/0c"


class TestModels:
    def test_load_follows_the_phases_until_it_serves(self, server: FakeServer) -> None:
        loading = Model(name="m", state=ModelState.MODEL_STATE_LOADING, phase=LoadPhase.LOAD_PHASE_FETCH)
        starting = Model(name="m", state=ModelState.MODEL_STATE_LOADING, phase=LoadPhase.LOAD_PHASE_START_ENGINE)
        serving = Model(name="m", state=ModelState.MODEL_STATE_SERVING, quantization="compressed-tensors")
        server.on("LoadModel", model_pb.LoadModelResponse(model=loading))
        changes = [model_pb.WatchModelResponse(model=model) for model in (loading, loading, starting, serving)]
        server.on("WatchModel", [*changes, Hang()])
        result = bitmill(server, "models", "load", URI, "--name", "m", "--max-model-len", "512", "--enforce-eager")
        assert result.exit_code == 0, result.output
        assert result.stderr.splitlines() == ["fetch", "start engine"]
        assert "compressed-tensors" in result.stdout
        request = server.only_call("LoadModel").request
        assert request.return_immediately
        assert (request.engine_options.max_model_len, request.engine_options.enforce_eager) == (512, True)

    def test_a_model_that_cannot_be_loaded_exits_with_1(self, server: FakeServer) -> None:
        error = ModelError(reason="ARTIFACT_CORRUPT", message="2 files differ", metadata={"files": "a, b"})
        failed = Model(name="m", state=ModelState.MODEL_STATE_FAILED, error=error)
        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m")))
        server.on("WatchModel", [model_pb.WatchModelResponse(model=failed)])
        result = bitmill(server, "models", "load", URI)
        assert result.exit_code == 1
        assert result.stderr.splitlines() == [
            "error: model m failed ARTIFACT_CORRUPT: 2 files differ",
            "  files=a, b",
        ]

    def test_list_show_and_unload(self, server: FakeServer) -> None:
        model = Model(name="m", state=ModelState.MODEL_STATE_SERVING, max_model_len=2048)
        server.on("ListModels", model_pb.ListModelsResponse(models=[model]))
        server.on("GetModel", model_pb.GetModelResponse(model=model))
        server.on("UnloadModel", model_pb.UnloadModelResponse())
        assert "2048" in bitmill(server, "models", "list").stdout
        assert "2048 tokens" in bitmill(server, "models", "show", "m").stdout
        assert bitmill(server, "models", "unload", "m").exit_code == 0

    def test_a_hot_swap_and_every_kind_of_engine_option(self, server: FakeServer) -> None:
        serving = Model(name="m-2", state=ModelState.MODEL_STATE_SERVING, aliases=["m", "best"])
        server.on("LoadModel", model_pb.LoadModelResponse(model=serving))
        server.on("WatchModel", [model_pb.WatchModelResponse(model=serving)])
        options = [
            "enable_lora=true",
            "max-num-seqs=16",
            "cpu_offload_gb=1.5",
            "dtype=float16",
            "batch_timeout=0.02",
            'hf_overrides={"sliding_window": 4096}',
        ]
        result = bitmill(
            server, "models", "load", URI, "--name", "m-2", "--alias", "m", "--alias", "best", "--unload-replaced",
            "--block-size", "16", *(part for option in options for part in ("--option", option)),
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "m, best" in result.stdout
        request = server.only_call("LoadModel").request
        assert (list(request.aliases), request.unload_replaced) == (["m", "best"], True)
        given = request.engine_options
        assert (given.enable_lora, given.max_num_seqs, given.cpu_offload_gb) == (True, 16, 1.5)
        assert (given.dtype, given.block_size) == ("float16", 16)
        assert given.batch_timeout.ToTimedelta() == timedelta(milliseconds=20)
        assert dict(given.hf_overrides) == {"sliding_window": 4096}

    def test_load_tells_how_much_of_a_phase_is_done(self, server: FakeServer) -> None:
        def fetched(completed: int) -> model_pb.WatchModelResponse:
            progress = LoadProgress(completed_bytes=completed, total_bytes=1_000_000)
            return model_pb.WatchModelResponse(
                model=Model(
                    name="m",
                    state=ModelState.MODEL_STATE_LOADING,
                    phase=LoadPhase.LOAD_PHASE_FETCH,
                    load_progress=progress,
                )
            )

        server.on("LoadModel", model_pb.LoadModelResponse(model=Model(name="m")))
        serving = model_pb.WatchModelResponse(model=Model(name="m", state=ModelState.MODEL_STATE_SERVING))
        server.on("WatchModel", [fetched(0), fetched(40_000), fetched(510_000), serving])
        result = bitmill(server, "models", "load", URI)
        assert result.stderr.splitlines() == ["fetch 0% of 1.0 MB", "fetch 50% of 1.0 MB"]

    def test_show_tells_what_a_model_has_and_what_became_of_it(self, server: FakeServer) -> None:
        model = Model(
            name="m",
            state=ModelState.MODEL_STATE_RESTARTING,
            error=ModelError(reason="ENGINE_DIED", message="gone"),
            aliases=["best"],
            supported_tasks=["generate", "embed"],
            adapters=[Adapter(name="a", rank=8, running_calls=2, uri="s3://b/a")],
            engine_options=EngineOptions(
                batch_timeout=timedelta(milliseconds=20),
                hf_overrides={"sliding_window": 4096},
                gpu_memory_utilization=0.9,
            ),
            restarts=3,
        )
        server.on("GetModel", model_pb.GetModelResponse(model=model))
        shown = dict(line.split(maxsplit=1) for line in bitmill(server, "models", "show", "m").stdout.splitlines())
        assert shown == {
            "model": "m",
            "state": "restarting",
            "error": "ENGINE_DIED: gone",
            "tasks": "generate, embed",
            "aliases": "best",
            "adapter": "a, rank 8, 2 running calls, s3://b/a",
            "restarts": "3",
            "gpu_memory_utilization": "0.9",
            "batch_timeout": "0.02 s",
            "hf_overrides": '{"sliding_window": 4096.0}',
        }

    def test_sleep_and_wake(self, server: FakeServer) -> None:
        sleeping = Model(name="m", state=ModelState.MODEL_STATE_SLEEPING)
        server.on("SleepModel", model_pb.SleepModelResponse(model=sleeping))
        server.on("WakeModel", model_pb.WakeModelResponse(model=Model(name="m", state=ModelState.MODEL_STATE_SERVING)))
        assert "sleeping" in bitmill(server, "models", "sleep", "m").stdout
        assert json.loads(bitmill(server, "models", "wake", "m", "--json").stdout)["state"] == "MODEL_STATE_SERVING"


class TestAliasesAndAdapters:
    def test_an_alias_is_set_and_deleted(self, server: FakeServer) -> None:
        server.on("SetAlias", model_pb.SetAliasResponse(model=Model(name="m", aliases=["best", "new"])))
        server.on("DeleteAlias", model_pb.DeleteAliasResponse())
        assert "best, new" in bitmill(server, "models", "alias", "set", "new", "m").stdout
        assert bitmill(server, "models", "alias", "delete", "best").exit_code == 0
        assert server.only_call("SetAlias").request == model_pb.SetAliasRequest(alias="new", name="m")
        assert server.only_call("DeleteAlias").request.alias == "best"

    def test_an_adapter_is_loaded_from_a_path_and_unloaded(self, server: FakeServer, tmp_path: Path) -> None:
        server.on("LoadAdapter", model_pb.LoadAdapterResponse(adapter=Adapter(name="a", digest="sha256:0", rank=8)))
        server.on("UnloadAdapter", model_pb.UnloadAdapterResponse())
        result = bitmill(
            server, "models", "adapters", "load", str(tmp_path), "--model", "m", "--name", "a", "--digest", "sha256:0"
        )
        assert "sha256:0" in result.stdout
        assert bitmill(server, "models", "adapters", "unload", "a", "--model", "m").exit_code == 0
        assert server.only_call("LoadAdapter").request == model_pb.LoadAdapterRequest(
            uri=tmp_path.as_uri(), model="m", name="a", digest="sha256:0"
        )


class TestTop:
    REPORT = model_pb.GetLoadResponse(
        loads=[
            ModelLoad(
                model="m",
                state=ModelState.MODEL_STATE_SERVING,
                running_requests=3,
                waiting_requests=7,
                kv_cache_usage=0.125,
                prompt_tokens_per_second=10,
                generation_tokens_per_second=99.96,
                refused_calls=2,
                max_num_seqs=16,
            )
        ]
    )

    def test_it_prints_a_row_for_each_model(self, server: FakeServer) -> None:
        server.on("GetLoad", self.REPORT)
        header, row = bitmill(server, "models", "top", "m").stdout.splitlines()
        assert header.split()[:4] == ["MODEL", "STATE", "RUNNING", "WAITING"]
        assert row.split() == ["m", "serving", "3/16", "7", "12.5%", "10.0", "100.0", "2"]
        assert server.only_call("GetLoad").request.model == "m"

    def test_it_prints_the_report_as_json(self, server: FakeServer) -> None:
        server.on("GetLoad", self.REPORT)
        assert json.loads(bitmill(server, "models", "top", "--json").stdout)["loads"][0]["runningRequests"] == 3

    def test_it_goes_on_until_interrupted(self, server: FakeServer) -> None:
        server.on("GetLoad", self.REPORT)
        command = [sys.executable, "-m", "bitmill.cli", "models", "top", "--json", "--watch", "0.1"]
        environment = os.environ | {"BITMILL_INFERENCE": server.address}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as run:
            assert run.stdout is not None
            assert all(json.loads(next(run.stdout))["loads"] for _ in range(3))
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=60)
        assert (run.returncode, stderr) == (130, "")
