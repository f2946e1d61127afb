"""The engine protocol: the request that the parent writes, the events that the engine answers with.

services/quantizer/engines/README.md describes it. Nothing here imports torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

PROTOCOL_VERSION = 1
SCHEMES = ("W4A16", "W8A16", "W8A8_INT8")
PER_CHANNEL = -1
MIN_SEQUENCE_LENGTH = 16


class EngineError(Exception):
    """A failure that the parent reports: a stable reason, a text for people and details by key."""

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


@dataclass(frozen=True)
class Recipe:
    """How to quantize; the fields of bitmill.artifact.v1.Recipe with every default filled in."""

    scheme: str
    group_size: int
    """Input channels that share one scale; PER_CHANNEL for one scale per output channel."""
    symmetric: bool
    ignore: tuple[str, ...]
    dampening_frac: float
    seed: int


@dataclass(frozen=True)
class Calibration:
    """What GPTQ sees while it rounds."""

    path: Path | None
    """A .txt or .jsonl file; None for the text that comes with Python."""
    num_samples: int
    max_sequence_length: int
    """Tokens in each sample."""


@dataclass(frozen=True)
class QuantizeRequest:
    """Make a quantized model directory of a checkpoint."""

    source_dir: Path
    output_dir: Path
    recipe: Recipe
    calibration: Calibration


@dataclass(frozen=True)
class EvaluateRequest:
    """Compare a quantized model directory with the checkpoint that it was made from."""

    source_dir: Path
    model_dir: Path
    num_tokens: int
    window: int
    """Tokens that the models see at once."""


@dataclass(frozen=True)
class Envelope:
    """A parsed request and the process that sent it."""

    request: QuantizeRequest | EvaluateRequest
    parent_pid: int | None


class EventWriter:
    """Writes one JSON object a line and flushes each, so that the parent sees it when it happens."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def progress(
        self, phase: str, completed: int, total: int, unit: str, *, loss: float | None = None, message: str = ""
    ) -> None:
        """Tell how far the operation is."""
        event: dict[str, Any] = {"phase": phase, "completed": completed, "total": total, "unit": unit}
        if loss is not None:
            event["loss"] = loss
        if message:
            event["message"] = message
        self._write("progress", event)

    def result(self, result: Mapping[str, Any]) -> None:
        """End with success."""
        self._write("result", result)

    def error(self, error: EngineError) -> None:
        """End with a failure."""
        self._write("error", {"reason": error.reason, "message": error.message, "metadata": error.metadata})

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        # allow_nan=False: NaN is not JSON, and a parent would take the line for a crash.
        self._stream.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._stream.flush()


def parse_request(data: bytes) -> Envelope:
    """Parse a request file; EngineError REQUEST_INVALID names the field that is wrong."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise EngineError("REQUEST_INVALID", f"the request is not JSON: {error}") from error
    fields = _Fields(value, "request")
    if (version := fields.integer("protocol_version")) != PROTOCOL_VERSION:
        fields.fail("protocol_version", f"is {version}; this engine speaks {PROTOCOL_VERSION}")
    parent_pid = fields.integer("parent_pid", minimum=1) if "parent_pid" in fields.value else None
    match fields.text("operation"):
        case "quantize":
            return Envelope(_parse_quantize(fields), parent_pid)
        case "evaluate":
            return Envelope(_parse_evaluate(fields), parent_pid)
        case operation:
            return fields.fail("operation", f'is "{operation}", neither "quantize" nor "evaluate"')


def _parse_quantize(fields: "_Fields") -> QuantizeRequest:
    return QuantizeRequest(
        source_dir=Path(fields.text("source_dir")).absolute(),
        output_dir=Path(fields.text("output_dir")).absolute(),
        recipe=_parse_recipe(fields.group("recipe")),
        calibration=_parse_calibration(fields.group("calibration")),
    )


def _parse_evaluate(fields: "_Fields") -> EvaluateRequest:
    return EvaluateRequest(
        source_dir=Path(fields.text("source_dir")).absolute(),
        model_dir=Path(fields.text("model_dir")).absolute(),
        num_tokens=fields.integer("num_tokens", minimum=1),
        window=fields.integer("window", minimum=MIN_SEQUENCE_LENGTH),
    )


def _parse_recipe(fields: "_Fields") -> Recipe:
    scheme = fields.text("scheme")
    if scheme not in SCHEMES:
        fields.fail("scheme", f'is "{scheme}", none of {", ".join(SCHEMES)}')
    group_size = PER_CHANNEL if fields.value.get("group_size") is None else fields.integer("group_size")
    if group_size != PER_CHANNEL and (group_size < 1 or scheme == "W8A8_INT8"):
        fields.fail("group_size", f"is {group_size}, which {scheme} does not take")
    symmetric = fields.boolean("symmetric")
    if not symmetric and scheme != "W4A16":
        fields.fail("symmetric", f"is false, which {scheme} does not take")
    dampening_frac = fields.number("dampening_frac")
    if not 0 < dampening_frac <= 1:
        fields.fail("dampening_frac", f"is {dampening_frac}, not in (0, 1]")
    return Recipe(
        scheme=scheme,
        group_size=group_size,
        symmetric=symmetric,
        ignore=fields.texts("ignore"),
        dampening_frac=dampening_frac,
        seed=fields.integer("seed", minimum=0),
    )


def _parse_calibration(fields: "_Fields") -> Calibration:
    path = None if fields.value.get("path") is None else Path(fields.text("path")).absolute()
    if path is not None and path.suffix not in (".txt", ".jsonl"):
        fields.fail("path", f'is "{path}", neither .txt nor .jsonl')
    return Calibration(
        path=path,
        num_samples=fields.integer("num_samples", minimum=1),
        max_sequence_length=fields.integer("max_sequence_length", minimum=MIN_SEQUENCE_LENGTH),
    )


class _Fields:
    """Typed reading of a JSON object, with errors that carry the field's path."""

    def __init__(self, value: object, path: str) -> None:
        self._path = path
        if not isinstance(value, dict):
            raise EngineError("REQUEST_INVALID", f"{path} is not a JSON object", field=path)
        self.value: dict[str, Any] = value

    def fail(self, name: str, problem: str) -> NoReturn:
        field = f"{self._path}.{name}"
        raise EngineError("REQUEST_INVALID", f"{field} {problem}", field=field)

    def group(self, name: str) -> "_Fields":
        return _Fields(self.value.get(name), f"{self._path}.{name}")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        return value if isinstance(value, str) and value else self.fail(name, "is not a non-empty string")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.value.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            self.fail(name, "is not a list of non-empty strings")
        return tuple(value)

    def boolean(self, name: str) -> bool:
        value = self.value.get(name)
        return value if isinstance(value, bool) else self.fail(name, "is neither true nor false")

    def integer(self, name: str, minimum: int | None = None) -> int:
        value = self.value.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(name, "is not an integer")
        if minimum is not None and value < minimum:
            self.fail(name, f"is {value}, less than {minimum}")
        return value

    def number(self, name: str) -> float:
        value = self.value.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(name, "is not a number")
        return float(value)
