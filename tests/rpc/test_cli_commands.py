"""What every command has: addresses, deadlines, errors, wrong usage, output that cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from bitmill.cli import app
from bitmill.inference.v1 import inference_service_pb2 as inference_pb
from bitmill.inference.v1 import model_service_pb2 as model_pb
from bitmill.inference.v1.model_pb2 import Model
from bitmill_common import errors
from support.cli import bitmill
from support.fake_services import FakeServer, Hang


class TestGlobal:
    def test_an_address_that_nobody_serves_says_which_option_is_meant(self, server: FakeServer) -> None:
        server.stop()
        result = bitmill(server, "models", "list")
        assert result.exit_code == 1
        assert f"is the inference service running at {server.address}?" in result.stderr
        assert "--inference or BITMILL_INFERENCE" in result.stderr

    def test_the_other_services_address_is_recognised(self, server: FakeServer) -> None:
        result = bitmill(server, "jobs", "list")
        assert "is it the quantizer service?" in result.stderr

    def test_an_address_option_wins_over_the_environment(self, server: FakeServer) -> None:
        server.on("ListModels", model_pb.ListModelsResponse())
        result = CliRunner().invoke(
            app, ["models", "list", "--inference", server.address], env={"BITMILL_INFERENCE": "127.0.0.1:1"}
        )
        assert result.exit_code == 0

    def test_a_closed_standard_output_is_no_failure(self, server: FakeServer) -> None:
        server.on("ListModels", model_pb.ListModelsResponse())
        command = [sys.executable, "-m", "bitmill.cli", "models", "list", "--inference", server.address]
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        "arguments",
        [["models", "list"], ["models", "list", "--json"], ["models", "top", "--watch", "1"], ["abort", "r1"]],
    )
    def test_a_full_disk_is_one_clear_error(self, server: FakeServer, arguments: list[str]) -> None:
        server.on("ListModels", model_pb.ListModelsResponse(models=[Model(name="m")]))
        server.on("GetLoad", model_pb.GetLoadResponse())
        server.on("Abort", inference_pb.AbortResponse())
        command = [sys.executable, "-m", "bitmill.cli", *arguments, "--inference", server.address]
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.stderr == "error: cannot write to standard output: No space left on device\n"
        assert done.returncode == 1

    def test_a_reader_that_has_had_enough_is_no_error(self, server: FakeServer) -> None:
        models = [Model(name=f"m{number}", uri="s3://bucket/" + "x" * 500) for number in range(1000)]
        server.on("ListModels", model_pb.ListModelsResponse(models=models))
        command = [sys.executable, "-m", "bitmill.cli", "models", "list", "--json", "--inference", server.address]
        done = subprocess.run(
            ["sh", "-c", '"$@" | head -n 1', "sh", *command], capture_output=True, text=True, timeout=60
        )
        assert json.loads(done.stdout)["name"] == "m0"
        assert done.stderr == ""

    def test_who_calls_is_an_option_of_every_command(self, server: FakeServer) -> None:
        server.on("ListModels", model_pb.ListModelsResponse())
        bitmill(server, "models", "list", "--caller-id", "me")
        assert server.only_call("ListModels").metadata["x-caller-id"] == "me"

    def test_the_timeout_is_the_calls_deadline(self, server: FakeServer) -> None:
        server.on("ListModels", Hang())
        result = bitmill(server, "models", "list", "--timeout", "0.2")
        assert result.exit_code == 1
        assert "DEADLINE_EXCEEDED" in result.stderr
        assert "--timeout SECONDS waits longer" in result.stderr

    def test_a_refusal_tells_when_to_try_again(self, server: FakeServer) -> None:
        server.on("Generate", errors.UnavailableError("QUEUE_FULL", "queue full", retry_after=timedelta(seconds=2)))
        result = bitmill(server, "generate", "Hi")
        assert "try again after 2 s" in result.stderr
        assert "running at" not in result.stderr

    @pytest.mark.parametrize(
        "arguments",
        [
            ["quantize", "s3://b/m"],
            ["quantize", "s3://b/m", "m", "--scheme", "W3A3"],
            ["quantize", "s3://b/m", "m", "--num-samples", "0"],
            ["quantize", "s3://b/m", "m", "--num-samples", str(2**32)],
            ["quantize", "s3://b/m", "m", "--seed", str(2**64)],
            ["quantize", "s3://b/m", "m", "--engine-option", "enable_lora=1"],
            ["generate", "hi", "--max-tokens", "-1"],
            ["generate", "hi", "--seed", str(2**63)],
            ["jobs", "list", "--state", "DONE"],
            ["jobs", "list", "--timeout"],
            ["jobs", "list", "--limit", str(2**64)],
            ["artifacts", "list", "--limit", str(2**64)],
            ["generate", "hi", "--regex", "a", "--json-object"],
            ["generate", "hi", "--json-schema", "/nowhere/schema.json"],
            ["generate", "hi", "--logit-bias", "5"],
            ["generate", "hi", "--logit-bias", "-5=1"],
            ["chat", "hi", "--tools", "/dev/null"],
            ["chat", "hi", "--chat-template-kwargs", "[1]"],
            ["models", "load", "s3://b/m", "--option", "enable_lora"],
            ["models", "load", "s3://b/m", "--option", "enable_lora=yes"],
            ["models", "load", "s3://b/m", "--option", "max_seqs=1"],
            ["models", "load", "s3://b/m", "--option", "max_num_seqs=many"],
            ["models", "load", "s3://b/m", "--option", "max_num_seqs=-1"],
            ["models", "load", "s3://b/m", "--option", "hf_overrides=[]"],
            ["models", "load", "s3://b/m", "--option", "batch_timeout=inf"],
            ["models", "load", "s3://b/m", "--option", "dtype=auto", "--option", "dtype=auto"],
            ["models", "load", "s3://b/m", "--max-num-seqs", "1", "--option", "max_num_seqs=1"],
            ["models", "top", "--watch", "0"],
            ["abort"],
            ["nonsense"],
        ],
    )
    def test_wrong_usage_exits_with_2_and_sends_nothing(self, server: FakeServer, arguments: list[str]) -> None:
        result = bitmill(server, *arguments)
        assert result.exit_code == 2, result.output
        assert result.stderr
        assert not isinstance(result.exception, ValueError)
        assert not server.received
