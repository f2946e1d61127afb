"""Many model directories loaded by the real vLLM, one after the other in one process; run with the inference python:

    python vllm_many.py MODELS.json

MODELS.json is a list of {"model": DIRECTORY, "kv_cache_dtype": …}. Prints as JSON, last, a list with one object for
each: "schemes", the class that vLLM chose for each layer by name, "text", what it generates, and "logprobs", those of
the prompt's tokens; or "error", its own words.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING"
)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

PROMPT = "The quick brown fox jumps over the lazy dog, and the with statement is used to wrap the execution of a block."


def main() -> None:
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers = [_load(**each) for each in json.loads(Path(sys.argv[1]).read_bytes())]
    stdout.write(json.dumps(answers) + "\n")
    stdout.flush()
    os._exit(0)


def _load(model: str, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    engine = None
    try:
        options: dict[str, Any] = {"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}
        engine = LLM(
            model,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_dtype=kv_cache_dtype,
            max_num_batched_tokens=128,
            **options,
        )
        found = engine.apply_model(_schemes)[0]
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
        [output] = engine.generate([PROMPT], sampling, use_tqdm=False)
        logprobs = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
        return {"schemes": found, "text": output.outputs[0].text, "logprobs": logprobs}
    except Exception as error:  # noqa: BLE001 (whatever vLLM says)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def _schemes(model: torch.nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "quant_method"):
            scheme = getattr(module, "scheme", None) or module.quant_method
            kernel = next((type(v).__name__ for k, v in vars(scheme).items() if "kernel" in k), "")
            found[name] = type(scheme).__name__ + (f"/{kernel}" if kernel else "")
    return found


if __name__ == "__main__":
    main()
