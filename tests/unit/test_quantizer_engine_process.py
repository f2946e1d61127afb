"""Running an engine: what it gets, and what becomes of it when it misbehaves. Its "interpreter" is a script here."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given

from bitmill_common.errors import BitmillError, FailedPreconditionError, InternalError
from bitmill_common.manifest_recipe import recipe_to_json
from bitmill_common.measurements import CalibrationUse, Evaluation, LayerLoss, ModuleResult, Sensitivity
from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_engine_kit.protocol import QuantizeRequest, parse_request
from bitmill_quantizer.jobs.job import JobCancelledError, Progress
from bitmill_quantizer.ports import EvaluateOutcome, QuantizeOutcome
from bitmill_quantizer.processes import engine_messages
from bitmill_quantizer.processes.engine_process import EngineProcess
from bitmill_quantizer.recipes.drafts import RecipeDraft
from bitmill_quantizer.recipes.recipe_rules import complete_recipe
from support import processes
from support.recipes import recipes

RESULT = {
    "event": "result",
    "versions": {"torch": "2.13.0"},
    "format": "compressed-tensors",
    "calibration": {
        "digest": "sha256:1",
        "num_samples": 4,
        "num_tokens": 128,
        "num_documents": 2,
        "uncalibrated_modules": ["model.layers.0.mlp.experts.3.down_proj"],
    },
    "num_quantized_modules": 14,
    "modules": [
        {"name": "a", "scheme": "W4A16", "group_size": 64, "loss": 0.5, "dampening_frac": 0.1, "remark": "damped"},
        {"name": "b", "scheme": "UNQUANTIZED", "group_size": 0, "loss": None, "dampening_frac": None, "remark": ""},
    ],
    "sensitivities": [
        {
            "modules": ["a"],
            "scheme": "W8A16",
            "group_size": -1,
            "kl_divergence": 0.25,
            "size_bytes": 7,
            "chosen": True,
        }
    ],
    "peak_memory_bytes": 5,
    "peak_device_memory_bytes": 6,
}
OUTCOME = QuantizeOutcome(
    versions={"torch": "2.13.0"},
    num_quantized_modules=14,
    format="compressed-tensors",
    calibration_use=CalibrationUse("sha256:1", 4, 128, 2, ("model.layers.0.mlp.experts.3.down_proj",)),
    modules=(
        ModuleResult("a", Scheme.W4A16, 64, 0.5, 0.1, "damped"),
        ModuleResult("b", Scheme.UNQUANTIZED),
    ),
    sensitivities=(Sensitivity(("a",), Scheme.W8A16, -1, 0.25, 7, True),),
    peak_memory_bytes=5,
    peak_device_memory_bytes=6,
)
EMIT = "def emit(**event): print(json.dumps(event), flush=True)"


class Control:
    """Keeps what is reported, and cancels once told to."""

    def __init__(self) -> None:
        self.reports: list[Progress] = []
        self.cancelled = threading.Event()

    def report(self, progress: Progress) -> None:
        self.reports.append(progress)

    def check(self) -> None:
        if self.cancelled.is_set():
            raise JobCancelledError

    def begin_publishing(self) -> None:
        raise AssertionError("an engine publishes nothing")


def engine(directory: Path, *lines: str) -> EngineProcess:
    """An engine whose program is these lines; `request` is what it was asked, `RESULT` a good result."""
    python = directory / "python"
    head = [f"#!{sys.executable}", "import json, os, signal, subprocess, sys", EMIT]
    known = ["request = json.load(open(sys.argv[-1]))", f"RESULT = json.loads({json.dumps(RESULT)!r})"]
    python.write_text("\n".join([*head, *known, *lines]))
    python.chmod(0o755)
    return EngineProcess("script", python, "engine_module", "`make setup` installs it")


@pytest.mark.parametrize("content", [b"#!/nowhere/python\n", b"", b"\x7fELF"])
def test_an_interpreter_that_cannot_be_run_is_said_so(tmp_path: Path, content: bytes) -> None:
    """The one that a virtual environment's script names may be gone."""
    broken = engine(tmp_path)
    (tmp_path / "python").write_bytes(content)
    with pytest.raises(FailedPreconditionError) as raised:
        quantize(broken, tmp_path)
    assert raised.value.reason == "ENGINE_NOT_INSTALLED"
    assert "`make setup` installs it" in raised.value.message


def quantize(engine: EngineProcess, directory: Path, control: Control | None = None) -> QuantizeOutcome:
    return engine.quantize(
        directory / "source",
        directory / "model",
        Recipe(Scheme.W4A16, 64, ignore=("lm_head", "re:x")),
        Calibration("", 4, 32),
        directory / "text.jsonl",
        control or Control(),
    )


def test_an_engine_gets_the_whole_request_and_its_progress_and_result_come_back(tmp_path: Path) -> None:
    control = Control()
    outcome = quantize(
        engine(
            tmp_path,
            "json.dump([sys.argv, request], open('seen.json', 'w'))",
            "emit(event='progress', phase='quantize', completed=1, total=2, unit='layers', loss=0.5)",
            "emit(event='progress', phase='quantize', completed=2, total=2, unit='layers')",
            "emit(**RESULT)",
        ),
        tmp_path,
        control,
    )
    assert control.reports == [Progress(1, 2, "layers", 0.5), Progress(2, 2, "layers")]
    assert outcome == OUTCOME
    arguments, request = json.loads((tmp_path / "seen.json").read_text())
    assert arguments[1:3] == ["-m", "engine_module"]
    assert request == {
        "protocol_version": 2,
        "parent_pid": os.getpid(),
        "operation": "quantize",
        "source_dir": str(tmp_path / "source"),
        "output_dir": str(tmp_path / "model"),
        "recipe": {
            "scheme": "W4A16",
            "algorithm": "GPTQ",
            "group_size": 64,
            "symmetric": True,
            "activation_order": "STATIC",
            "ignore": ["lm_head", "re:x"],
            "rules": [],
            "kv_cache": None,
            "smoothing_strength": 0.0,
            "dampening_frac": 0.01,
            "seed": 0,
            "adaptive": None,
        },
        "calibration": {
            "path": str(tmp_path / "text.jsonl"),
            "packing": "CONCATENATE",
            "num_samples": 4,
            "max_sequence_length": 32,
        },
    }


def test_a_recipe_that_needs_no_data_has_used_none(tmp_path: Path) -> None:
    outcome = quantize(engine(tmp_path, "emit(**RESULT | {'calibration': None})"), tmp_path)
    assert outcome.calibration_use is None


@given(recipes)
def test_every_recipe_of_the_server_is_one_to_the_engine(draft: RecipeDraft) -> None:
    """The words of the one are those that the other reads."""
    recipe, _ = complete_recipe(draft, 64)
    if recipe is None:
        return
    request = {
        "protocol_version": 2,
        "operation": "quantize",
        "source_dir": "/source",
        "output_dir": "/model",
        "recipe": recipe_to_json(recipe),
        "calibration": engine_messages.calibration_json(Calibration(), None),
    }
    parsed = parse_request(json.dumps(request).encode()).request
    assert isinstance(parsed, QuantizeRequest)
    assert parsed.recipe.treatment.scheme == recipe.scheme.value
    assert [rule.pattern for rule in parsed.recipe.rules] == [rule.pattern for rule in recipe.rules]
    assert (parsed.recipe.adaptive is None) == (recipe.adaptive is None)


def test_an_evaluation_comes_back_whole(tmp_path: Path) -> None:
    lines = [
        "emit(event='result', source_perplexity=10.0, artifact_perplexity=10.5, mean_kl_divergence=0.02,"
        " p99_kl_divergence=0.2, top1_agreement=0.9, layer_losses=[{'layer': 'a', 'relative_error': 0.1}],"
        " num_tokens=64, peak_memory_bytes=3, peak_device_memory_bytes=4)"
    ]
    outcome = engine(tmp_path, *lines).evaluate(tmp_path / "source", tmp_path / "model", 64, 32, Control())
    evaluation = Evaluation(10.0, 10.5, 0.02, 64, 0.2, 0.9, (LayerLoss("a", 0.1),))
    assert outcome == EvaluateOutcome(evaluation, 3, 4)


def test_an_engine_sees_no_secrets_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no use for store keys, and runs code of others."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    monkeypatch.setenv("BITMILL_QUANTIZER_DATABASE_URL", "postgresql://user:s3cret@db/jobs")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    quantize(engine(tmp_path, "json.dump(dict(os.environ), open('seen.json', 'w'))", "emit(**RESULT)"), tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert "s3cret" not in str(seen)
    assert (seen["OMP_NUM_THREADS"], seen["HF_HUB_OFFLINE"]) == ("2", "1")


@pytest.mark.parametrize(
    ("lines", "kind", "reason", "text"),
    [
        (["sys.exit(0)"], InternalError, "ENGINE_CRASHED", "status 0 and no result"),
        (["emit(**RESULT)", "sys.exit(9)"], InternalError, "ENGINE_CRASHED", "status 9"),
        (["os.abort()"], InternalError, "ENGINE_CRASHED", "SIGABRT"),
        (['sys.stdout.write(\'{"event": "res\'); sys.stdout.flush()'], InternalError, "ENGINE_CRASHED", "no result"),
        (["print('x' * (9 << 20), end='', flush=True); signal.pause()"], InternalError, "ENGINE_PROTOCOL", "8388608"),
        (["print('[1]', flush=True); signal.pause()"], InternalError, "ENGINE_PROTOCOL", "no event"),
        (["del RESULT['versions']", "emit(**RESULT)"], InternalError, "ENGINE_PROTOCOL", "versions"),
        *(
            ([f"emit(**RESULT | {change!r})"], InternalError, "ENGINE_PROTOCOL", next(iter(change)))
            for change in (
                {"num_quantized_modules": -1},
                {"peak_memory_bytes": 2**64},
                {"peak_device_memory_bytes": 1.5},
                {"versions": ["torch"]},
                {"modules": 3},
            )
        ),
        (["RESULT['modules'][0]['loss'] = float('nan')", "emit(**RESULT)"], InternalError, "ENGINE_PROTOCOL", "loss"),
        *(
            ([f"emit(event='progress', **{progress!r})"], InternalError, "ENGINE_PROTOCOL", next(iter(progress)))
            for progress in ({"completed": -1}, {"total": 2**63}, {"completed": "x"}, {"loss": "inf"})
        ),
        (["emit(event='progress', loss=float('inf'))"], InternalError, "ENGINE_PROTOCOL", "loss"),
        *(
            ([f"emit(event='error', **{fields!r})", "sys.exit(1)"], InternalError, "ENGINE_PROTOCOL", "no event")
            for fields in ({"reason": "\ud800"}, {"message": "a\ud800"}, {"metadata": {"role": "\udfff"}})
        ),
        (
            ["emit(event='error', reason='ODD', message='odd', metadata=['x'])", "sys.exit(1)"],
            FailedPreconditionError,
            "ODD",
            "odd",
        ),
        (
            ["emit(event='error', reason='OUT_OF_MEMORY', message='too big')", "sys.exit(1)"],
            FailedPreconditionError,
            "OUT_OF_MEMORY",
            "too big",
        ),
    ],
)
def test_an_engine_that_misbehaves_is_ended_and_named(
    tmp_path: Path, lines: list[str], kind: type[BitmillError], reason: str, text: str
) -> None:
    with pytest.raises(kind, match=text) as failure:
        quantize(engine(tmp_path, *lines), tmp_path)
    assert failure.value.reason == reason


def test_the_end_of_a_crashed_engines_log_is_in_the_error(tmp_path: Path) -> None:
    """However much came before it."""
    lines = ["print('noise' * 100_000, file=sys.stderr)", "print('the reason', file=sys.stderr)", "sys.exit(1)"]
    with pytest.raises(InternalError, match=r"the reason$") as failure:
        quantize(engine(tmp_path, *lines), tmp_path)
    assert len(failure.value.message) < 5000


def test_a_child_that_outlives_its_engine_holds_nobody_up_and_is_ended(tmp_path: Path) -> None:
    """It keeps the pipe open; the result counts all the same."""
    lines = [
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])",
        "open('child', 'w').write(str(child.pid))",
        "emit(**RESULT)",
    ]
    assert quantize(engine(tmp_path, *lines), tmp_path).num_quantized_modules == 14
    assert processes.ends(int((tmp_path / "child").read_text()))


def test_a_cancelled_engine_may_clean_up(tmp_path: Path) -> None:
    """SIGTERM comes first."""
    lines = [
        "def clean_up(*_): open('cleaned', 'w').close(); sys.exit(0)",
        "signal.signal(signal.SIGTERM, clean_up)",
        "emit(event='progress', phase='quantize', completed=1, total=2, unit='layers')",
        "signal.pause()",
    ]
    control = Control()
    control.report = lambda progress: control.cancelled.set()  # type: ignore[method-assign]
    with pytest.raises(JobCancelledError):
        quantize(engine(tmp_path, *lines), tmp_path, control)
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("name", ["none", "directory", "text"])
def test_what_is_no_interpreter_is_said_before_it_is_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "text").touch(mode=0o644)
    with pytest.raises(FailedPreconditionError, match="make setup") as failure:
        EngineProcess("script", tmp_path / name, "engine_module", "`make setup` installs it").require_installed()
    assert failure.value.reason == "ENGINE_NOT_INSTALLED"
