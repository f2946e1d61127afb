"""The engines that jobs may name, and what each of them does. Pure; whether one is installed is `EngineProcess`'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bitmill_common.artifact import COMPRESSED_TENSORS, GPTQ_FORMAT
from bitmill_common.errors import FieldViolation
from bitmill_common.recipes import Algorithm, Recipe, Scheme, Treatment

DEFAULT_ENGINE = "llmcompressor"
UNSUPPORTED = "UNSUPPORTED_BY_ENGINE"

_CLASSIC_SCHEMES = frozenset({Scheme.W4A16, Scheme.W8A16})


@dataclass(frozen=True)
class EngineTraits:
    """What an engine does. None: everything that the server accepts.

    `schemes`: of a recipe and its rules, UNQUANTIZED rules aside. `one_treatment`: rules may only leave layers as they
    are. `architectures`: by the names in a checkpoint's config.json. `needs_cuda`: it does nothing on the processor.
    """

    format: str
    schemes: frozenset[Scheme] | None = None
    architectures: frozenset[str] | None = None
    one_treatment: bool = False
    needs_cuda: bool = False
    reads_gguf: bool = False


# The classic layout has room for symmetric GPTQ only in vLLM 0.32: `TYPE_MAP` of AutoGPTQConfig in
# model_executor/layers/quantization/auto_gptq.py is 4 and 8 bits without zero points.
ENGINES: dict[str, EngineTraits] = {
    DEFAULT_ENGINE: EngineTraits(COMPRESSED_TENSORS, reads_gguf=True),
    # Of `MODEL_MAP` in gptqmodel 7.6.0's models/auto.py: those whose matrices it rounds as they are. It takes Phi3's
    # fused ones apart, which vLLM would not find.
    "gptqmodel": EngineTraits(
        GPTQ_FORMAT,
        schemes=_CLASSIC_SCHEMES,
        architectures=frozenset(
            {
                "CohereForCausalLM",
                "Cohere2ForCausalLM",
                "GemmaForCausalLM",
                "Gemma2ForCausalLM",
                "Gemma3ForCausalLM",
                "GraniteForCausalLM",
                "LlamaForCausalLM",
                "MistralForCausalLM",
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "StableLmForCausalLM",
            }
        ),
    ),
    # Of `SUPPORTED_MODELS` in auto-gptq 0.7.1's modeling/_const.py: the dense ones that vLLM serves.
    "auto_gptq": EngineTraits(
        GPTQ_FORMAT,
        schemes=_CLASSIC_SCHEMES,
        architectures=frozenset({"GemmaForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}),
        one_treatment=True,
        needs_cuda=True,
    ),
}


def recipe_violations(engine: str, recipe: Recipe) -> Iterator[FieldViolation]:
    """Yields every field of a valid recipe that the engine does not do."""
    traits = ENGINES[engine]
    if traits.schemes is None:
        return
    yield from _treatment_violations(engine, traits, "spec.recipe", recipe.treatment)
    for index, rule in enumerate(recipe.rules):
        field = f"spec.recipe.rules[{index}]"
        if rule.treatment.scheme is Scheme.UNQUANTIZED:
            continue
        if traits.one_treatment and rule.treatment != recipe.treatment:
            yield _violation(f"{field}.scheme", f"must be UNQUANTIZED: {engine} treats all layers of a model alike")
        else:
            yield from _treatment_violations(engine, traits, field, rule.treatment)
    if recipe.kv_cache is not None:
        yield _violation("spec.recipe.kv_cache", f"must be unset for {engine}")


def _treatment_violations(
    engine: str, traits: EngineTraits, field: str, treatment: Treatment
) -> Iterator[FieldViolation]:
    schemes = traits.schemes or frozenset()
    if treatment.scheme not in schemes:
        known = " and ".join(sorted(scheme.value for scheme in schemes))
        yield _violation(f"{field}.scheme", f"{engine} does {known}; {DEFAULT_ENGINE} does {treatment.scheme.value}")
        return
    if treatment.algorithm is not Algorithm.GPTQ:
        yield _violation(f"{field}.algorithm", f"{engine} does GPTQ; {DEFAULT_ENGINE} does {treatment.algorithm.value}")
    if not treatment.symmetric:
        yield _violation(f"{field}.symmetric", f"must be true for {engine}: vLLM serves its layout only so")


def _violation(field: str, description: str) -> FieldViolation:
    return FieldViolation(field, description, UNSUPPORTED)
