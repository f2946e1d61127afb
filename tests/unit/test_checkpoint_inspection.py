"""A checkpoint is judged from its config and headers, and each way of being unusable has its own reason."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from bitmill_common.checkpoint import Checkpoint, TensorInfo, inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, PermissionDeniedError
from bitmill_common.object_store import ObjectStore
from bitmill_common.safetensors import DTYPE_BITS
from bitmill_common.stores import Stores
from support.checkpoints import llama_shapes, write_checkpoint, write_safetensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SURROGATE = b'{"weight_map": {"\\ud800": "model-00001-of-00003.safetensors"}}'
FIRST_SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", num_shards=3, tie_word_embeddings=False, dtype="F32")


def open_store(directory: Path) -> ObjectStore:
    return Stores([directory.parent.as_uri()]).open(directory.as_uri(), "uri")


def inspect(directory: Path) -> Checkpoint:
    return inspect_checkpoint(open_store(directory))


def refuse(directory: Path, reason: str) -> FailedPreconditionError:
    with pytest.raises(FailedPreconditionError) as raised:
        inspect(directory)
    assert raised.value.reason == reason
    assert raised.value.metadata["uri"] == directory.as_uri()
    assert directory.as_uri() in raised.value.message
    return raised.value


def test_a_checkpoint_in_one_file(directory: Path) -> None:
    checkpoint = inspect(directory)
    shapes = llama_shapes(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config == json.loads((directory / "config.json").read_bytes())
    assert checkpoint.tensors == {name: TensorInfo("BF16", shape, WEIGHTS) for name, shape in shapes.items()}
    assert checkpoint.num_parameters == sum(math.prod(shape) for shape in shapes.values())
    assert checkpoint.quantization is None
    present = sorted((path.name, path.stat().st_size) for path in directory.iterdir())
    assert [(info.path, info.size_bytes) for info in checkpoint.files] == present
    assert checkpoint.size_bytes == sum(size for _, size in present)


def test_a_checkpoint_in_shards(sharded: Path) -> None:
    checkpoint = inspect(sharded)
    index = json.loads((sharded / INDEX).read_bytes())
    assert {name: tensor.file for name, tensor in checkpoint.tensors.items()} == index["weight_map"]
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F32"}
    assert "lm_head.weight" in checkpoint.tensors
    assert {info.path for info in checkpoint.files} == {path.name for path in sharded.iterdir()}


def test_duplicates_and_code_are_no_part_of_it(directory: Path) -> None:
    """Other formats of the same weights, Python files, hidden files and what lies deeper are left where they are."""
    before = inspect(directory)
    for name in (
        "pytorch_model.bin",
        "consolidated.safetensors",
        "model.gguf",
        "tf_model.h5",
        "modeling_x.py",
        ".gitattributes",
        "original/consolidated.00.pth",
        "onnx/model.onnx",
    ):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"x")
    assert inspect(directory) == before


def test_a_directory_of_more_files_than_are_looked_at_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link out of the roots, which every listing refuses, could lie behind the last one that is looked at."""
    monkeypatch.setattr("bitmill_common.checkpoint._MAX_FILES", len(list(directory.iterdir())))
    inspect(directory)
    (directory / "tokenizer.txt").touch()
    (directory / "vocab.secret").symlink_to("/etc/passwd")
    refuse(directory, "TOO_MANY_FILES")


def test_a_whole_file_is_preferred_to_an_index(sharded: Path) -> None:
    """As transformers does."""
    write_safetensors(sharded / WEIGHTS, {"a": (2, 3)})
    checkpoint = inspect(sharded)
    assert checkpoint.tensors == {"a": TensorInfo("BF16", (2, 3), WEIGHTS)}
    assert FIRST_SHARD not in {info.path for info in checkpoint.files}


def test_weights_are_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of any size no more than its header is asked for."""
    write_safetensors(directory / WEIGHTS, {"large": (1024, 4096)}, seed=None)
    store = open_store(directory)
    read = store.read
    lengths: list[int] = []

    def counted(path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = read(path, offset=offset, length=length)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(store, "read", counted)
    assert inspect_checkpoint(store).num_parameters == 1024 * 4096
    assert sum(lengths) < 300_000


def test_a_header_longer_than_the_first_read_is_read_whole(directory: Path) -> None:
    shapes = {f"model.layers.{layer}.a.long.name.of.a.weight": (1,) for layer in range(10_000)}
    write_safetensors(directory / WEIGHTS, shapes)
    assert list(inspect(directory).tensors) == list(shapes)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"compression_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
    ],
)
def test_a_quantized_checkpoint_says_how(tmp_path: Path, change: dict[str, object]) -> None:
    directory = write_checkpoint(tmp_path / "quantized", config=change)
    assert inspect(directory).quantization == {"quant_method": "gptq"}


def test_nothing_at_the_uri_is_no_source(tmp_path: Path) -> None:
    refuse(tmp_path / "nothing", "SOURCE_NOT_FOUND")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", "SOURCE_NOT_FOUND")


def test_a_directory_without_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    refuse(directory, "CONFIG_MISSING")


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"NaN", b"\xff", b"[" * 100_000, b"{}"),
        *(b'{"architectures": []}', b'{"architectures": "A"}', b'{"architectures": ["\\ud800"]}'),
        b'{"architectures": ["A"], "quantization_config": {"quant_method": "\\ud800"}}',
    ],
)
def test_a_config_that_is_none(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    assert refuse(directory, "CONFIG_INVALID").metadata["file"] == "config.json"


def test_missing_shards_are_all_named(sharded: Path) -> None:
    for shard in (1, 3):
        (sharded / f"model-0000{shard}-of-00003.safetensors").unlink()
    error = refuse(sharded, "SHARD_MISSING")
    assert error.metadata["shards"] == "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"
    assert error.metadata["shards"] in error.message


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert refuse(sharded, "SHARD_MISSING").metadata["shards"] == INDEX


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickles_alone_are_refused(directory: Path, name: str) -> None:
    (directory / WEIGHTS).rename(directory / name)
    refuse(directory, "PICKLE_ONLY")


@pytest.mark.parametrize("with_config", [True, False])
def test_gguf_alone_is_refused(directory: Path, with_config: bool) -> None:
    (directory / WEIGHTS).rename(directory / "model-q4.gguf")
    if not with_config:
        (directory / "config.json").unlink()
    refuse(directory, "GGUF_UNSUPPORTED")


def test_a_config_without_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    refuse(directory, "WEIGHTS_MISSING")


def test_a_checkpoint_without_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    refuse(directory, "TOKENIZER_MISSING")
    (directory / "tokenizer.model").write_bytes(b"x")
    assert inspect(directory).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "shard",
    [
        "../secret/x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "..",
        "",
        "a\0.safetensors",
        "pytorch_model.bin",
        "config.json",
        7,
        None,
        ["x.safetensors"],
    ],
)
def test_a_shard_that_is_no_file_beside_the_index(sharded: Path, shard: object) -> None:
    """It could lead out of the checkpoint, or to what is no safetensors."""
    index = json.loads((sharded / INDEX).read_bytes())
    index["weight_map"]["lm_head.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    refuse(sharded, "INDEX_INVALID")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"\xff", SURROGATE]
)
def test_an_index_that_is_none(sharded: Path, content: bytes) -> None:
    (sharded / INDEX).write_bytes(content)
    assert refuse(sharded, "INDEX_INVALID").metadata["file"] == INDEX


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_bytes())
    index["weight_map"]["model.layers.9.weight"] = FIRST_SHARD
    (sharded / INDEX).write_text(json.dumps(index))
    assert "model.layers.9.weight" in refuse(sharded, "INDEX_INVALID").message


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 2000, -1])
def test_a_truncated_file(directory: Path, kept: int) -> None:
    """Within the length, within the header, within the tensors, or by one byte."""
    data = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(data[:kept])
    error = refuse(directory, "HEADER_INVALID")
    assert error.metadata["problem"] == "TRUNCATED"
    assert error.metadata["file"] == WEIGHTS


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    data = (sharded / FIRST_SHARD).read_bytes()
    (sharded / FIRST_SHARD).write_bytes(data[:-100])
    assert refuse(sharded, "HEADER_INVALID").metadata["file"] == FIRST_SHARD


def tensor(dtype: object = "F32", shape: object = (2,), start: object = 0, stop: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b"[" * 100_000,
        {"a": None},
        {"a": {}},
        {"a": tensor(dtype="F7")},
        {"a": tensor(dtype=4)},
        {"a": tensor(shape=[3])},
        {"a": tensor(shape=[-2])},
        {"a": tensor(shape=[True, 2])},
        {"a": tensor(shape=[2.0])},
        {"a": tensor(shape="2")},
        {"a": tensor(start=-8, stop=0)},
        {"a": tensor(start=8, stop=0)},
        {"a": tensor(start=0.0)},
        {"a": tensor(shape=[1], start=4), "b": tensor(shape=[1], start=4)},
        {"a": tensor(shape=[1], stop=4)},
        {"a": tensor(shape=[10**30, 0, 10**30], stop=1)},
        {"a": tensor(shape=[0, 10**4000], stop=0)},
        {"a": tensor(start=-(10**4299), stop=10**4299)},
        b'{"\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        {"a" * 513: tensor(shape=[2], stop=8)},
        {},
    ],
    ids=lambda header: str(header)[:80],
)
def test_a_header_that_cannot_be_right(directory: Path, header: bytes | dict[str, object]) -> None:
    """Tensors that overlap, leave gaps or do not have their bytes; the file holds 8 bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    assert refuse(directory, "HEADER_INVALID").metadata["problem"] == "MALFORMED"


def test_a_header_of_absurd_length_is_not_read(directory: Path) -> None:
    with (directory / WEIGHTS).open("r+b") as writer:
        writer.write((2**63).to_bytes(8, "little"))
    assert refuse(directory, "HEADER_INVALID").metadata["problem"] == "MALFORMED"


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_of_safetensors_is_known(directory: Path, dtype: str) -> None:
    size = 8 * DTYPE_BITS[dtype] // 8
    text = json.dumps({"a": tensor(dtype, [8], 0, size), "none": tensor(dtype, [0, 3], size, size)}).encode()
    (directory / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    checkpoint = inspect(directory)
    assert checkpoint.tensors["a"].num_elements == 8
    assert checkpoint.num_parameters == 8


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_weights_of_the_example_are_small_numbers(tmp_path: Path, dtype: str) -> None:
    """What the tests' own checkpoints hold can be computed with: no infinity, no NaN."""
    write_safetensors(tmp_path / WEIGHTS, {"a": (500,)}, dtype)
    data = (tmp_path / WEIGHTS).read_bytes()
    data = data[8 + int.from_bytes(data[:8], "little") :]
    if dtype == "BF16":
        data = b"".join(b"\0\0" + data[index : index + 2] for index in range(0, len(data), 2))
    values = struct.unpack(f"<500{'e' if dtype == 'F16' else 'f'}", data)
    assert all(2**-8 < abs(value) < 2**-4 for value in values)
    assert min(values) < 0 < max(values)


def hub_cache(checkpoint: Path, repository: Path) -> Path:
    """Lays a checkpoint out as the Hub's cache does, every file a link to a blob, and returns the snapshot."""
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(checkpoint.iterdir())):
        path.rename(blobs / f"{index:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{index:064x}")
    return snapshot


def test_links_within_the_roots_are_followed(sharded: Path, tmp_path: Path) -> None:
    """As in the Hub's cache, whose snapshots are links to blobs beside them."""
    before = inspect(sharded)
    repository = tmp_path / "models--org--name"
    snapshot = hub_cache(sharded, repository)
    store = Stores([repository.as_uri()]).open(snapshot.as_uri(), "uri")
    assert inspect_checkpoint(store) == before


def test_links_out_of_the_roots_are_not_followed(sharded: Path, tmp_path: Path) -> None:
    """A root at the snapshot alone does not contain its blobs."""
    snapshot = hub_cache(sharded, tmp_path / "models--org--name")
    with pytest.raises(PermissionDeniedError) as raised:
        inspect_checkpoint(Stores([snapshot.as_uri()]).open(snapshot.as_uri(), "uri"))
    assert raised.value.reason == "URI_OUTSIDE_ROOTS"


def test_a_link_that_ends_nowhere_is_a_missing_file(sharded: Path, tmp_path: Path) -> None:
    """As after an interrupted download."""
    (sharded / FIRST_SHARD).unlink()
    (sharded / FIRST_SHARD).symlink_to("../blobs/gone")
    assert refuse(sharded, "SHARD_MISSING").metadata["shards"] == FIRST_SHARD


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    """Nobody can say which counts."""
    other = FIRST_SHARD.replace("00001", "00002")
    index = json.loads((sharded / INDEX).read_bytes())
    held = [name for name, shard in index["weight_map"].items() if shard == FIRST_SHARD]
    (sharded / other).write_bytes((sharded / FIRST_SHARD).read_bytes())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != other}
    index["weight_map"][held[0]] = other
    (sharded / INDEX).write_text(json.dumps(index))
    message = refuse(sharded, "INDEX_INVALID").message
    assert FIRST_SHARD in message
    assert other in message


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer.model"])
def test_an_empty_companion(directory: Path, name: str) -> None:
    """Left by a download that was cut off."""
    (directory / name).write_bytes(b"")
    assert refuse(directory, "FILE_EMPTY").metadata["file"] == name


@pytest.mark.parametrize(
    ("name", "reason"), [("config.json", "CONFIG_INVALID"), (WEIGHTS, "HEADER_INVALID"), (INDEX, "INDEX_INVALID")]
)
def test_an_empty_file_of_the_model(directory: Path, name: str, reason: str) -> None:
    if name == INDEX:
        (directory / WEIGHTS).unlink()
    (directory / name).write_bytes(b"")
    assert refuse(directory, reason).metadata["file"] == name


def test_empty_files_that_nobody_reads_do_not_matter(directory: Path) -> None:
    (directory / "merges.txt").write_bytes(b"")
    (directory / "LICENSE").write_bytes(b"")
    assert inspect(directory).architecture == "LlamaForCausalLM"
