"""Brings a model up: resolve, fetch, verify, start the engine, warm it up."""

from __future__ import annotations

from bitmill_common.artifact import Device
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, InvalidArgumentError
from bitmill_inference.artifacts.artifact_source import ArtifactSource, LocalModel, Source
from bitmill_inference.models.devices import require_device, require_options
from bitmill_inference.models.engine_options import EngineOptions, check_consistency, check_engine_options, options_of
from bitmill_inference.models.memory import MemoryNeed, check_fits, memory_need
from bitmill_inference.models.model import LoadPhase, ModelState
from bitmill_inference.models.model_entry import ModelEntry
from bitmill_inference.models.threads import in_thread
from bitmill_inference.ports import Engine, EngineFactory
from bitmill_inference.requests.generation import RequestOptions
from bitmill_inference.requests.pooling import EmbedParams
from bitmill_inference.requests.prompts import TokensPrompt
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.requests.violations import Violations

# With log probabilities: on a fresh machine vLLM compiles what they need at their first use, and every stream of the
# model would stand still for that long (25 s on two cores).
WARM_UP = SamplingParams(max_tokens=1, logprobs=1)


class ModelLoader:
    """Brings models up on this server's device. `defaults`: options where neither request nor manifest says."""

    def __init__(self, source: ArtifactSource, engines: EngineFactory, defaults: EngineOptions) -> None:
        self._source = source
        self._engines = engines
        self._defaults = defaults

    async def load(self, entry: ModelEntry) -> None:
        """Gives the entry its files and an engine that is ready. Errors as of the source and the engines.

        A cancellation leaves what the entry has so far to its `release`.
        """
        source = await in_thread(self._source.resolve, entry.store)
        entry.change(digest=source.digest)
        device = await in_thread(self._engines.device)
        if source.manifest is not None:
            require_device(source.manifest.devices, device, f"the {source.manifest.recipe.scheme.value} artifact")
        entry.set_options(self._effective(entry.model.options, source))
        require_options(entry.options, device)
        entry.enter_phase(LoadPhase.FETCH)
        with entry.counting(source.size_bytes) as on_bytes:
            local = entry.local = await in_thread(self._source.fetch, source, on_bytes, undo=LocalModel.release)
        entry.enter_phase(LoadPhase.VERIFY)
        with entry.counting(source.size_bytes if source.manifest else 0) as on_bytes:
            await in_thread(self._source.verify, source, local, on_bytes)
        entry.enter_phase(LoadPhase.START_ENGINE)
        await self.start_engine(entry)

    def _effective(self, requested: EngineOptions, source: Source) -> EngineOptions:
        """What the request says, then the manifest, then the settings."""
        violations = Violations()
        values = source.manifest.engine_options if source.manifest else None
        manifest = options_of(values or {}, violations, "engine_options")
        check_engine_options(manifest, violations)
        self._engines.check_options(manifest, violations)
        if violations.found:
            raise _wrong_options("MANIFEST_OPTIONS_INVALID", "the artifact's manifest has wrong options", violations)
        options = requested.with_defaults(manifest).with_defaults(self._defaults)
        check_consistency(options, violations)
        if violations.found:
            message = "the options of the request, the manifest and the server's settings together"
            raise _wrong_options("OPTIONS_CONFLICT", f"{message} contradict each other", violations)
        return options

    async def start_engine(self, entry: ModelEntry) -> None:
        """Gives an entry that has its files an engine, warmed up."""
        if entry.local is None:
            raise AssertionError("an engine starts on files")
        device = (await in_thread(self._engines.device)).device
        need = await in_thread(_memory_need, entry.local, entry.options, device)
        engine = entry.engine = await self._engines.start(
            entry.local.directory, entry.options, lambda memory: check_fits(need, memory)
        )
        if entry.state is ModelState.LOADING:
            entry.enter_phase(LoadPhase.WARM_UP)
        try:
            await _warm_up(engine)
        except InvalidArgumentError as error:
            # Of a request that nobody made; as when the context has no room for a token.
            message = f"the model cannot do what it is for: {error.message}"
            raise FailedPreconditionError("WARM_UP_FAILED", message) from error
        await entry.adapters.restore(engine)


def _wrong_options(reason: str, message: str, violations: Violations) -> FailedPreconditionError:
    details = "; ".join(f"{violation.field}: {violation.description}" for violation in violations.found)
    fields = ", ".join(violation.field for violation in violations.found)
    return FailedPreconditionError(reason, f"{message}: {details}", {"fields": fields})


def _memory_need(local: LocalModel, options: EngineOptions, device: Device) -> MemoryNeed:
    return memory_need(inspect_checkpoint(local.store), options, device)


async def _warm_up(engine: Engine) -> None:
    if "generate" in engine.info.supported_tasks:
        async for _ in engine.generate(TokensPrompt((0,)), WARM_UP, RequestOptions(), stream=False):
            pass
    elif "embed" in engine.info.supported_tasks:
        await engine.embed([TokensPrompt((0,))], EmbedParams(), RequestOptions())
