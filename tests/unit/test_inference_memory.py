"""What an engine takes at least, what there is, and which loads are refused for it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bitmill_common.artifact import Device
from bitmill_common.checkpoint import Checkpoint, inspect_checkpoint
from bitmill_common.errors import ResourceExhaustedError
from bitmill_common.safetensors import TensorInfo
from bitmill_common.stores import Stores
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.host_memory import host_available_bytes
from bitmill_inference.models.memory import (
    GIB,
    PROCESS_BYTES,
    DeviceMemory,
    MemoryNeed,
    ServerMemory,
    check_fits,
    gpu_memory_utilization,
    memory_need,
    weight_bytes,
)
from support.checkpoints import write_checkpoint

ELEMENTS = 1000


def checkpoint(tensors: dict[str, str], quantization: dict[str, object] | None = None, **config: object) -> Checkpoint:
    """A checkpoint with tensors of a thousand elements, given by their dtype."""
    infos = {name: TensorInfo(dtype, (10, 100), "model.safetensors") for name, dtype in tensors.items()}
    return Checkpoint(dict(config), "LlamaForCausalLM", infos, (), 0, ELEMENTS * len(infos), quantization)


@pytest.mark.parametrize(
    ("dtype", "option", "width"),
    [
        ("F32", None, 2),
        ("F32", "auto", 2),
        ("F32", "bfloat16", 2),
        ("F32", "float32", 4),
        ("BF16", None, 2),
        ("BF16", "float32", 4),
        ("F16", "float16", 2),
        ("F8_E4M3", None, 1),
        ("I32", None, 4),
    ],
)
def test_weights_count_as_the_engine_holds_them(dtype: str, option: str | None, width: int) -> None:
    """Floating-point ones in the type that the engine makes of them; packed ones as they are stored."""
    model = checkpoint({"model.layers.0.mlp.up_proj.weight": dtype}, num_hidden_layers=1)
    assert weight_bytes(model, EngineOptions(dtype=option)) == width * ELEMENTS


def test_scales_of_quantized_weights_are_not_widened() -> None:
    """They stay as they are stored, or become the engine's type: the lower one counts."""
    model = checkpoint({"a.weight_packed": "I32", "a.weight_scale": "BF16"}, {"quant_method": "compressed-tensors"})
    assert weight_bytes(model, EngineOptions(dtype="float32")) == (4 + 2) * ELEMENTS


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("lm_head.weight", {}, {"tie_word_embeddings": True}),
        ("lm_head.weight", {}, {"text_config": {"tie_word_embeddings": True}}),
        ("lm_head.weight", {"runner": "pooling"}, {}),
        ("lm_head.weight", {"convert": "embed"}, {}),
        ("model.layers.2.mlp.up_proj.weight", {}, {}),
        ("model.layers.1.mlp.up_proj.weight", {"hf_overrides": {"num_hidden_layers": 1}}, {}),
        ("mtp.layers.0.mlp.up_proj.weight", {}, {}),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}, {}),
    ],
)
def test_what_the_engine_leaves_out_does_not_count(
    name: str, options: dict[str, object], config: dict[str, object]
) -> None:
    """So that no model is refused that fits."""
    model = checkpoint({"model.layers.0.mlp.up_proj.weight": "BF16", name: "BF16"}, **{"num_hidden_layers": 2} | config)
    assert weight_bytes(model, EngineOptions(**options)) == 2 * ELEMENTS  # type: ignore[arg-type]


def test_a_real_checkpoint_takes_its_tensors_bytes(tmp_path: Path) -> None:
    """Half of them when its float32 becomes bfloat16."""
    directory = write_checkpoint(tmp_path / "model", dtype="F32")
    model = inspect_checkpoint(Stores([tmp_path.as_uri()]).open(directory.as_uri(), "uri"))
    assert weight_bytes(model, EngineOptions()) == 2 * model.num_parameters
    assert weight_bytes(model, EngineOptions(dtype="float32")) == 4 * model.num_parameters


def need(device: Device, weights: int, kv_cache: int = 0, **options: object) -> MemoryNeed:
    return MemoryNeed(weights, kv_cache, EngineOptions(**options), device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "copies", "workers", "processes"),
    [
        ({}, 1, 1, 2),
        ({"data_parallel_size": 2}, 2, 2, 4),
        ({"tensor_parallel_size": 2}, 1, 2, 3),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}, 2, 8, 10),
    ],
)
def test_the_host_needs_each_copy_each_cache_and_each_process(
    options: dict[str, object], copies: int, workers: int, processes: int
) -> None:
    """To the byte; one byte less is refused with every part."""
    needed = copies * 7 * GIB + workers * 3 * GIB + processes * PROCESS_BYTES
    model = need(Device.CPU, 7 * GIB, 3 * GIB, **options)
    check_fits(model, ServerMemory(needed))
    with pytest.raises(ResourceExhaustedError) as caught:
        check_fits(model, ServerMemory(needed - 1))
    assert caught.value.reason == "INSUFFICIENT_MEMORY"
    assert caught.value.metadata == {
        "needed_bytes": str(needed),
        "available_bytes": str(needed - 1),
        "weights_bytes": str(copies * 7 * GIB),
        "kv_cache_bytes": str(workers * 3 * GIB),
        "overhead_bytes": str(processes * PROCESS_BYTES),
    }


def test_the_cache_has_its_default_on_the_cpu_alone() -> None:
    """2 GiB; on a GPU it gets what is left."""
    model = checkpoint({"a.weight": "BF16"})
    assert memory_need(model, EngineOptions(), Device.CPU).kv_cache == 2 * GIB
    assert memory_need(model, EngineOptions(), Device.CUDA).kv_cache == 0
    assert memory_need(model, EngineOptions(kv_cache_memory_bytes=5), Device.CUDA).kv_cache == 5


@pytest.mark.parametrize(
    ("options", "kv_cache", "available"),
    [
        ({"kv_cache_memory_bytes": 10 * GIB}, 10 * GIB, 50 * GIB),  # of 60 that are free
        ({"gpu_memory_utilization": 0.5}, 0, 40 * GIB),  # of 80 in all
        ({"gpu_memory_utilization": 0.5}, 10 * GIB, 50 * GIB),  # which a given cache size overrules
        ({"gpu_memory_utilization": 0.75, "tensor_parallel_size": 2}, 0, 120 * GIB),  # half on each
        ({"gpu_memory_utilization": 0.75, "cpu_offload_gb": 4}, 0, 64 * GIB),
    ],
)
def test_a_gpu_needs_its_share_of_the_weights_and_a_cache(
    options: dict[str, object], kv_cache: int, available: int
) -> None:
    """Weights up to `available` fit beside the cache; more are refused, naming the GPU."""
    memory = ServerMemory(0, (DeviceMemory(80 * GIB, 60 * GIB),) * 2)
    check_fits(need(Device.CUDA, available, kv_cache, **options), memory)
    with pytest.raises(ResourceExhaustedError) as caught:
        check_fits(need(Device.CUDA, available + 4, kv_cache, **options), memory)
    assert caught.value.metadata["free_bytes"] == str(60 * GIB)
    assert "GPU 0" in caught.value.message


def test_every_gpu_that_the_engine_uses_is_looked_at_and_no_other() -> None:
    """A copy may be refused for its second GPU."""
    memory = ServerMemory(0, (DeviceMemory(80 * GIB, 70 * GIB), DeviceMemory(80 * GIB, GIB)))
    check_fits(need(Device.CUDA, 40 * GIB, gpu_memory_utilization=0.8), memory)
    for sizes in ({"data_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        options = {"gpu_memory_utilization": 0.8, **sizes}
        with pytest.raises(ResourceExhaustedError, match="GPU 1"):
            check_fits(need(Device.CUDA, 40 * GIB, **options), memory)  # type: ignore[arg-type]


def test_what_is_not_known_is_not_refused() -> None:
    """Memory of other hosts, and of GPUs that the driver does not tell about."""
    check_fits(need(Device.CPU, 2**50, distributed_executor_backend="ray"), ServerMemory(GIB))
    check_fits(need(Device.CUDA, 2**50), ServerMemory(GIB))


def write_host(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapFree: 0 kB\n"} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


V1 = "sys/memory/pods/mine"


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8000 * 1024, id="no limit"),
        pytest.param(
            {"proc/meminfo": "MemAvailable: 8000 kB\nSwapFree: 1000 kB\n", "proc/self/cgroup": "0::/\n"},
            9000 * 1024,
            id="swap",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pods/mine\n",
                "sys/pods/memory.max": "5000000\n",
                "sys/pods/memory.current": "4000000\n",
                "sys/pods/memory.stat": "anon 1000\ninactive_file 200000\nactive_file 50000\nslab_reclaimable 1\n",
                "sys/pods/mine/memory.max": "max\n",
                "sys/pods/mine/memory.current": "1\n",
            },
            1_250_001,
            id="v2, of the group above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/host/path/unseen\n",
                "sys/memory.max": "3000000\n",
                "sys/memory.current": "1000000\n",
                "sys/memory.stat": "inactive_file 0\n",
            },
            2_000_000,
            id="v2, in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:cpu,memory:/pods/mine\n0::/\n",
                f"{V1}/memory.limit_in_bytes": "6000000\n",
                f"{V1}/memory.usage_in_bytes": "5000000\n",
                f"{V1}/memory.stat": "inactive_file 9\ntotal_inactive_file 300000\ntotal_active_file 100000\n",
                "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/memory/memory.usage_in_bytes": "1\n",
                "sys/memory/memory.stat": "",
            },
            1_400_000,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/memory.max": "1000\n",
                "sys/memory.current": "2000\n",
                "sys/memory.stat": "",
            },
            0,
            id="over its limit",
        ),
    ],
)
def test_the_host_has_what_the_kernel_and_every_control_group_allow(
    files: dict[str, str], available: int, tmp_path: Path
) -> None:
    """The least of them; caches that can be dropped count as free."""
    assert host_available_bytes(*write_host(tmp_path, files)) == available


def test_this_host_has_memory() -> None:
    """The real files can be read."""
    assert host_available_bytes() > 2**20


@pytest.mark.parametrize(
    ("options", "kv_cache", "share"),
    [
        ({}, 0, 0.92),
        ({"gpu_memory_utilization": 0.5}, 0, 0.5),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": GIB}, GIB, 0.5),
    ],
)
def test_the_share_of_a_gpu_that_the_engine_may_use_has_to_be_free(
    options: dict[str, object], kv_cache: int, share: float
) -> None:
    """vLLM does not start otherwise, however small the model is: refused before a process is, with both numbers."""
    wanted = math.floor(80 * GIB * share)
    check_fits(need(Device.CUDA, GIB, kv_cache, **options), ServerMemory(0, (DeviceMemory(80 * GIB, wanted),)))
    with pytest.raises(ResourceExhaustedError, match=f"gpu_memory_utilization {share:g} has to be free") as caught:
        check_fits(need(Device.CUDA, GIB, kv_cache, **options), ServerMemory(0, (DeviceMemory(80 * GIB, wanted - 1),)))
    assert caught.value.metadata["needed_bytes"] == str(wanted)
    assert caught.value.metadata["available_bytes"] == str(wanted - 1)


def test_a_model_with_a_cache_of_a_given_size_starts_beside_others() -> None:
    """It needs its weights and its cache, and no share of the GPU."""
    options = EngineOptions(kv_cache_memory_bytes=2 * GIB)
    assert math.floor(80 * GIB * gpu_memory_utilization(options)) < GIB
    check_fits(MemoryNeed(GIB, 2 * GIB, options, Device.CUDA), ServerMemory(0, (DeviceMemory(80 * GIB, 3 * GIB),)))
