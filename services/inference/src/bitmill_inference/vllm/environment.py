"""The environment variables that vLLM and its libraries read when they are imported. Imports none of them."""

from __future__ import annotations

import os
from pathlib import Path

from bitmill_inference.vllm.process import LOG_LEVEL_VARIABLE

# Read by vLLM and its libraries when they are imported, and by the engine's processes.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # vLLM's log lines go through our own handlers, here and in its processes.
    "VLLM_CONFIGURE_LOGGING": "0",
    # The server has threads; a forked child of it may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# Where vLLM makes the sockets between the server and its engines.
_SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
# Would overrule the KV cache size of every model on the CPU.
_OVERRULING_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def prepare_environment(log_level: str, directory: Path) -> None:
    """Sets them, for this process and those that engines run in. `directory`: where vLLM makes its sockets."""
    os.environ.update(_ENVIRONMENT)
    os.environ[_SOCKETS_VARIABLE] = str(directory)
    os.environ[LOG_LEVEL_VARIABLE] = log_level
    os.environ.pop(_OVERRULING_VARIABLE, None)
