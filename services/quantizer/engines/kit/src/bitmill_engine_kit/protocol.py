"""The engine protocol: the request that the parent writes, the events that the engine answers with.

services/quantizer/engines/README.md describes it. Nothing here imports torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

T = TypeVar("T")

PROTOCOL_VERSION = 2
UNQUANTIZED = "UNQUANTIZED"
ADAPTIVE = "ADAPTIVE"
INTEGER_SCHEMES = ("W4A16", "W8A16", "W8A8_INT8")
SCHEMES = (*INTEGER_SCHEMES, "FP8_DYNAMIC", "FP8_STATIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", UNQUANTIZED, ADAPTIVE)
ALGORITHMS = ("GPTQ", "AWQ", "RTN", "NONE")
ACTIVATION_ORDERS = ("NONE", "STATIC", "GROUP")
TRUNCATE = "TRUNCATE"
PACKINGS = ("CONCATENATE", TRUNCATE)
PER_CHANNEL = -1
FIXED_GROUP_SIZE = 0
MIN_SEQUENCE_LENGTH = 16
MAX_TEXT_CHARACTERS = 8000
"""Of an error; a parent takes no lines of many megabytes."""


class EngineError(Exception):
    """A failure that the parent reports: a stable reason, a text for people and details by key."""

    def __init__(self, reason: str, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}


@dataclass(frozen=True)
class Treatment:
    """What is done to a layer."""

    scheme: str
    algorithm: str
    group_size: int
    """Input channels that share one scale; PER_CHANNEL, or FIXED_GROUP_SIZE where the scheme has one layout only."""
    symmetric: bool


@dataclass(frozen=True)
class ModuleRule:
    """Another treatment for the layers that a pattern matches: an exact name, or a regular expression after "re:"."""

    pattern: str
    treatment: Treatment


@dataclass(frozen=True)
class AdaptiveSearch:
    """What ADAPTIVE chooses from, and the one budget that is not None."""

    candidates: tuple[Treatment, ...]
    max_size_bytes: int | None
    """Of the artifact's weight files."""
    max_perplexity_ratio: float | None
    num_samples: int
    """Calibration samples that the sensitivity is measured on."""


@dataclass(frozen=True)
class Recipe:
    """How to quantize; the fields of bitmill.artifact.v1.Recipe with every default filled in."""

    treatment: Treatment
    """Of the layers that neither `ignore` nor `rules` names."""
    ignore: tuple[str, ...]
    rules: tuple[ModuleRule, ...]
    """The first that matches counts; `ignore` goes before them."""
    activation_order: str
    kv_cache: str | None
    """"FP8", or None for a cache as the serving engine is told."""
    smoothing_strength: float
    """SmoothQuant's; 0 for none."""
    dampening_frac: float
    seed: int
    adaptive: AdaptiveSearch | None


@dataclass(frozen=True)
class Calibration:
    """What the model sees while it is quantized."""

    path: Path | None
    """A .txt or .jsonl file; None for the text that comes with Python."""
    num_samples: int
    max_sequence_length: int
    """Most tokens in each sample."""
    packing: str = "CONCATENATE"


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
class DeviceSupport:
    """One kind of device that can serve a model; the compute capability is major * 10 + minor, 0 for a CPU."""

    device: str
    """"cpu" or "cuda"."""
    min_compute_capability: int


@dataclass(frozen=True)
class VerifyRequest:
    """Load a model directory into the serving engine and generate with it."""

    model_dir: Path
    devices: tuple[DeviceSupport, ...]
    """The devices that can serve it; on any other the check is skipped."""


Request = QuantizeRequest | EvaluateRequest | VerifyRequest


@dataclass(frozen=True)
class Envelope:
    """A parsed request and the process that sent it."""

    request: Request
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
        """End with a failure, of whose texts the beginning is told: a library's can hold all that it was given."""
        metadata = {key: _beginning(value) for key, value in error.metadata.items()}
        self._write("error", {"reason": error.reason, "message": _beginning(error.message), "metadata": metadata})

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        # allow_nan=False: NaN is not JSON, and a parent would take the line for a crash.
        line = json.dumps({"event": event, **fields}, allow_nan=False, ensure_ascii=False)
        # Half a surrogate pair, which a chat template may say back to its data, becomes a question mark.
        self._stream.write(line.encode(errors="replace").decode() + "\n")
        self._stream.flush()


def _beginning(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"


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
        case "verify":
            return Envelope(_parse_verify(fields), parent_pid)
        case operation:
            return fields.fail("operation", f'is "{operation}", none of "quantize", "evaluate" and "verify"')


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


def _parse_verify(fields: "_Fields") -> VerifyRequest:
    return VerifyRequest(
        model_dir=Path(fields.text("model_dir")).absolute(),
        devices=tuple(
            DeviceSupport(each.choice("device", ("cpu", "cuda")), each.integer("min_compute_capability", minimum=0))
            for each in fields.groups("devices")
        ),
    )


def _parse_recipe(fields: "_Fields") -> Recipe:
    treatment = _parse_treatment(fields)
    dampening_frac = fields.number("dampening_frac")
    if not 0 < dampening_frac <= 1:
        fields.fail("dampening_frac", f"is {dampening_frac}, not in (0, 1]")
    smoothing_strength = fields.number("smoothing_strength")
    if not 0 <= smoothing_strength <= 1:
        fields.fail("smoothing_strength", f"is {smoothing_strength}, not in [0, 1]")
    if (treatment.scheme == ADAPTIVE) != (fields.value.get("adaptive") is not None):
        fields.fail("adaptive", f"goes with the scheme {ADAPTIVE}, and with that only")
    return Recipe(
        treatment=treatment,
        ignore=fields.texts("ignore"),
        rules=tuple(
            ModuleRule(rule.text("pattern"), _parse_treatment(rule, adaptive=False)) for rule in fields.groups("rules")
        ),
        activation_order=fields.choice("activation_order", ACTIVATION_ORDERS),
        kv_cache=fields.optional("kv_cache", lambda name: fields.choice(name, ("FP8",))),
        smoothing_strength=smoothing_strength,
        dampening_frac=dampening_frac,
        seed=fields.integer("seed", minimum=0),
        adaptive=fields.optional("adaptive", lambda name: _parse_adaptive(fields.group(name))),
    )


def _parse_treatment(fields: "_Fields", *, adaptive: bool = True) -> Treatment:
    scheme = fields.choice("scheme", SCHEMES if adaptive else tuple(each for each in SCHEMES if each != ADAPTIVE))
    return Treatment(
        scheme=scheme,
        algorithm=fields.choice("algorithm", ALGORITHMS),
        group_size=fields.integer("group_size", minimum=PER_CHANNEL),
        symmetric=fields.boolean("symmetric"),
    )


def _parse_adaptive(fields: "_Fields") -> AdaptiveSearch:
    return AdaptiveSearch(
        candidates=tuple(_parse_treatment(each, adaptive=False) for each in fields.groups("candidates")),
        max_size_bytes=fields.optional("max_size_bytes", lambda name: fields.integer(name, minimum=1)),
        max_perplexity_ratio=fields.optional("max_perplexity_ratio", fields.number),
        num_samples=fields.integer("num_samples", minimum=1),
    )


def _parse_calibration(fields: "_Fields") -> Calibration:
    path = None if fields.value.get("path") is None else Path(fields.text("path")).absolute()
    if path is not None and path.suffix not in (".txt", ".jsonl"):
        fields.fail("path", f'is "{path}", neither .txt nor .jsonl')
    return Calibration(
        path=path,
        num_samples=fields.integer("num_samples", minimum=1),
        max_sequence_length=fields.integer("max_sequence_length", minimum=MIN_SEQUENCE_LENGTH),
        packing=fields.choice("packing", PACKINGS),
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

    def groups(self, name: str) -> list["_Fields"]:
        value = self.value.get(name)
        if not isinstance(value, list):
            self.fail(name, "is not a list")
        return [_Fields(each, f"{self._path}.{name}[{index}]") for index, each in enumerate(value)]

    def optional(self, name: str, read: Callable[[str], T]) -> T | None:
        return None if self.value.get(name) is None else read(name)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.text(name)
        return value if value in choices else self.fail(name, f'is "{value}", none of {", ".join(choices)}')

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
