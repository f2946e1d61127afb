"""Sampling parameters in vLLM's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

from bitmill_inference.requests.sampling import SAMPLING_FIELD, SamplingParams, is_greedy
from bitmill_inference.requests.violations import Violations
from bitmill_inference.vllm.structured import CheckedSamplingParams, structured_outputs_params

# Fields that pass through under vLLM's own names when they are set.
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "n",
    "thinking_token_budget",
    "detokenize",
    "stream_interval",
)
# Sequences that vLLM tells empty from absent.
_LIST_FIELDS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
# vLLM takes -1 for no seed, and adds the index of the sequence to it.
_SEEDS = 2**62
# Tokens between two outputs that no sequence reaches.
_ONLY_ENDS = 2**30


def vllm_sampling_params(
    params: SamplingParams, defaults: Mapping[str, Any], room: int, *, stream: bool
) -> CheckedSamplingParams:
    """Converts. `defaults` are of the model's generation_config, `room` the tokens that its context has left.

    Without `stream`, vLLM gives out sequences only when they end, but of several sequences also the first token: only
    then does it say how many tokens of the prompt the first of them found cached.
    Raises `InvalidArgumentError` for what is wrong together with these defaults.
    """
    values = {key: value for key, value in defaults.items() if key != "max_tokens"}
    values |= {name: value for name in _PLAIN_FIELDS if (value := getattr(params, name)) is not None}
    values |= {name: list(value) for name in _LIST_FIELDS if (value := getattr(params, name))}
    values["max_tokens"] = params.max_tokens or min(defaults.get("max_tokens", room), room)
    _check_together(values)
    if params.seed is not None:
        values["seed"] = params.seed % _SEEDS
    if params.logit_bias:
        values["logit_bias"] = dict(params.logit_bias)
    if params.structured_outputs is not None:
        values["structured_outputs"] = structured_outputs_params(params.structured_outputs)
    if (detection := params.repetition_detection) is not None:
        values["repetition_detection"] = RepetitionDetectionParams(
            detection.max_pattern_size, detection.min_pattern_size, detection.min_count
        )
    if stream:
        values["output_kind"] = RequestOutputKind.DELTA
    elif values.get("n", 1) > 1:
        values |= {"output_kind": RequestOutputKind.DELTA, "stream_interval": _ONLY_ENDS}
    else:
        values["output_kind"] = RequestOutputKind.FINAL_ONLY
    return CheckedSamplingParams(**values, skip_clone=True)


def _check_together(values: Mapping[str, Any]) -> None:
    violations = Violations()
    if values.get("n", 1) > 1 and is_greedy(values.get("temperature", 1)):
        description = "must be 1 with a temperature of 0, which the model's generation_config sets"
        violations.add(f"{SAMPLING_FIELD}.n", description, "CONFLICT")
    if values.get("min_tokens", 0) > values["max_tokens"]:
        description = f"at most max_tokens, which the model's generation_config sets to {values['max_tokens']}"
        violations.add(f"{SAMPLING_FIELD}.min_tokens", description, "OUT_OF_RANGE")
    violations.raise_if_any()
