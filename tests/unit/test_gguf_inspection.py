"""A GGUF file is a source like any checkpoint, judged from its header alone; what would be read wrongly is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bitmill_common.checkpoint import Checkpoint, inspect_source
from bitmill_common.errors import FailedPreconditionError
from bitmill_common.gguf import GgufError, read_gguf_header
from bitmill_common.stores import Stores
from bitmill_quantizer.plans.layer_sizes import weights_bytes_in_16_bits
from bitmill_quantizer.plans.layers import linear_layers
from bitmill_quantizer.plans.sources import open_source
from support.checkpoints import write_checkpoint
from support.gguf_files import LLAMA, llama_tensors, write_gguf

NAME = "tiny.gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "checkpoint" / NAME)


def inspect(path: Path) -> Checkpoint:
    stores = Stores([path.parent.as_uri() if path.suffix == ".gguf" else path.as_uri()])
    return open_source(stores, path.as_uri(), "uri").inspect()


def refuse(path: Path, reason: str) -> FailedPreconditionError:
    with pytest.raises(FailedPreconditionError) as raised:
        inspect(path)
    assert raised.value.reason == reason
    return raised.value


def test_a_file_as_the_checkpoint_that_it_becomes(file: Path) -> None:
    checkpoint = inspect(file)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config["max_position_embeddings"] == 256
    assert checkpoint.config["hidden_size"] == 256
    assert checkpoint.config["vocab_size"] == 2000
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.quantization is None
    assert linear_layers(checkpoint)["model.layers.1.mlp.down_proj"] == (256, 512)
    assert len(linear_layers(checkpoint)) == 14
    assert [(info.path, info.size_bytes) for info in checkpoint.files] == [(NAME, file.stat().st_size)]
    assert checkpoint.size_bytes == file.stat().st_size


def test_its_tensors_count_in_16_bits(file: Path) -> None:
    """What the engine holds is dequantized, more than three times the file of 4-bit weights."""
    checkpoint = inspect(file)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"BF16"}
    assert weights_bytes_in_16_bits(checkpoint.tensors.values()) > 3 * checkpoint.size_bytes


@pytest.mark.parametrize(("type_name", "dtype"), [("F16", "F16"), ("BF16", "BF16"), ("F32", "BF16"), ("Q8_0", "BF16")])
def test_the_type_that_it_is_dequantized_to(tmp_path: Path, type_name: str, dtype: str) -> None:
    path = write_gguf(tmp_path / NAME, tensors=llama_tensors(type_name, tied=False))
    checkpoint = inspect(path)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {dtype}
    assert checkpoint.tensors["lm_head.weight"].shape == (2000, 256)


def test_a_directory_with_one_file(file: Path) -> None:
    """Companions are files of it, pickles and other formats are not."""
    (file.parent / "README.md").write_text("x")
    (file.parent / "pytorch_model.bin").write_bytes(b"x")
    checkpoint = inspect(file.parent)
    assert checkpoint.tensors == inspect(file).tensors
    assert [info.path for info in checkpoint.files] == ["README.md", NAME]


def test_a_directory_with_several_files_needs_a_choice(file: Path) -> None:
    write_gguf(file.parent / "other.gguf")
    error = refuse(file.parent, "GGUF_AMBIGUOUS")
    assert error.metadata["files"] == f"other.gguf, {NAME}"
    assert inspect(file).architecture == "LlamaForCausalLM"


def test_safetensors_go_before_gguf(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "both")
    write_gguf(directory / NAME)
    assert {tensor.file for tensor in inspect(directory).tensors.values()} == {"model.safetensors"}
    assert {tensor.file for tensor in inspect(directory / NAME).tensors.values()} == {NAME}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    error = refuse(tmp_path / NAME, "SOURCE_NOT_FOUND")
    assert error.metadata["file"] == NAME


def test_a_mixture_of_experts_by_its_single_layers(tmp_path: Path) -> None:
    metadata = {
        key.replace("llama.", "qwen3moe."): value for key, value in LLAMA.items() if key != "general.architecture"
    } | {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 8}
    tensors = llama_tensors() | {
        "blk.0.ffn_gate_inp.weight": ("F32", (8, 256)),
        "blk.0.ffn_gate_exps.weight": ("Q8_0", (8, 512, 256)),
        "blk.0.ffn_up_exps.weight": ("Q8_0", (8, 512, 256)),
        "blk.0.ffn_down_exps.weight": ("Q8_0", (8, 256, 512)),
    }
    layers = linear_layers(inspect(write_gguf(tmp_path / NAME, metadata, tensors)))
    assert layers["model.layers.0.mlp.experts.7.gate_proj"] == (512, 256)
    assert layers["model.layers.0.mlp.experts.0.down_proj"] == (256, 512)
    assert "model.layers.0.mlp.gate" not in layers


@pytest.mark.parametrize(
    ("change", "tensors", "words"),
    [
        ({"general.architecture": "mamba"}, {}, "mamba"),
        ({"general.architecture": ["llama"]}, {}, "architecture"),
        ({"general.architecture": []}, {}, "architecture"),
        ({"general.architecture": 1.5}, {}, "architecture"),
        ({"split.count": 3}, {}, "part"),
        ({"llama.expert_count": 8}, {}, "experts"),
        ({"llama.rope.scaling.type": "linear"}, {}, "rotary"),
        ({}, {"rope_freqs.weight": ("F32", (16,))}, "rotary"),
        ({}, {"blk.0.attn_sinks.weight": ("F32", (16,))}, "attn_sinks"),
        ({}, {"other": ("F32", (16,))}, "other"),
        (
            {},
            {f"blk.{layer}.ffn_up_exps.weight": ("F32", (4096, 0, 16)) for layer in range(65)},
            "more than 262144 matrices",
        ),
    ],
)
def test_what_transformers_would_read_wrongly(
    tmp_path: Path, change: dict[str, object], tensors: dict[str, tuple[str, tuple[int, ...]]], words: str
) -> None:
    path = write_gguf(tmp_path / NAME, LLAMA | change, llama_tensors() | tensors)
    error = refuse(path, "GGUF_UNSUPPORTED")
    assert words in error.message
    assert error.metadata["file"] == NAME


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    """Needs one beside it."""
    bare = {key: value for key, value in LLAMA.items() if not key.startswith("tokenizer.")}
    path = write_gguf(tmp_path / "bare" / NAME, bare)
    refuse(path.parent, "TOKENIZER_MISSING")
    (path.parent / "tokenizer.json").write_text("{}")
    assert inspect(path.parent).architecture == "LlamaForCausalLM"
    refuse(path, "TOKENIZER_MISSING")


@pytest.mark.parametrize(
    ("architecture", "split", "is_read"),
    [
        ("llama", "gpt-2", True),
        ("llama", "default", True),
        ("llama", None, True),
        ("llama", "llama-bpe", False),
        ("llama", "smollm", False),
        ("qwen2", "qwen2", True),
        ("qwen2", "deepseek-r1-qwen", False),
    ],
)
def test_a_tokenizer_that_splits_texts_as_transformers_does_not(
    tmp_path: Path, architecture: str, split: str | None, is_read: bool
) -> None:
    """It would make other tokens than the model was trained on; the right one beside it goes before it."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()}
    metadata |= {"general.architecture": architecture} | ({"tokenizer.ggml.pre": split} if split else {})
    path = write_gguf(tmp_path / "checkpoint" / NAME, metadata)
    if is_read:
        assert linear_layers(inspect(path))
        return
    assert str(split) in refuse(path, "TOKENIZER_MISSING").message
    (path.parent / "tokenizer.json").write_text("{}")
    assert linear_layers(inspect(path.parent))


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 5000, -40])
def test_a_truncated_file(file: Path, kept: int) -> None:
    """Within the magic, the counts, the metadata, the vocabulary, or the tensors."""
    file.write_bytes(file.read_bytes()[:kept])
    error = refuse(file, "HEADER_INVALID")
    assert error.metadata == {"uri": file.parent.as_uri(), "file": NAME, "problem": "TRUNCATED"}


def broken(*, counts: tuple[int, int] = (0, 0), rest: bytes = b"", magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + struct.pack("<IQQ", version, *counts) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    "data",
    [
        broken(magic=b"FUGG"),
        broken(version=1),
        broken(version=0x03000000),
        broken(counts=(2**60, 0)),
        broken(counts=(0, 2**60)),
        broken(counts=(0, 1), rest=text(b"\xff") + struct.pack("<I", 4)),
        broken(counts=(0, 1), rest=text(b"k") + struct.pack("<I", 77)),
        broken(counts=(0, 1), rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)),
        broken(counts=(0, 1), rest=text(b"k") + struct.pack("<IIQ", 9, 4, 2**60)),
        broken(counts=(0, 1), rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        broken(counts=(0, 1), rest=text(b"k" * 600) + struct.pack("<II", 4, 0)),
        broken(counts=(1, 0), rest=text(b"t") + struct.pack("<I", 9)),
        broken(counts=(1, 0), rest=text(b"t") + struct.pack("<IQIQ", 1, 8, 99, 0)),
        broken(counts=(1, 0), rest=text(b"t") + struct.pack("<IQIQ", 1, 8, 12, 0)),
        broken(counts=(1, 0), rest=text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)),
        broken(counts=(2, 0), rest=2 * (text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0))),
    ],
)
def test_a_header_that_cannot_be_right(file: Path, data: bytes) -> None:
    """Wrong magic, version, counts, texts, types, alignment, shapes, names, or a tensor twice."""
    file.write_bytes(data + bytes(64))
    assert refuse(file, "HEADER_INVALID").metadata["problem"] == "MALFORMED"


def test_tensors_are_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file of any size no more than its header is asked for, in pieces of a few MiB."""
    with file.open("r+b") as writer:
        writer.truncate(2**33)
    source = open_source(Stores([file.parent.as_uri()]), file.as_uri(), "uri")
    read = source.store.read
    lengths: list[int] = []

    def counted(path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = read(path, offset=offset, length=length)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(source.store, "read", counted)
    assert source.inspect().config["vocab_size"] == 2000
    assert sum(lengths) <= 4 * 2**20


def test_long_lists_are_counted_and_not_kept(file: Path) -> None:
    """A vocabulary is not held in memory."""
    store = Stores([file.parent.as_uri()]).open(file.parent.as_uri(), "uri")
    header = read_gguf_header(store, store.head(NAME))
    assert header.lengths["tokenizer.ggml.tokens"] == 2000
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.metadata["llama.rope.freq_base"] == 10000.0


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("length", [0, 3, 30])
def test_texts_are_passed_over_wherever_a_piece_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, length: int
) -> None:
    """What follows a long list is found, and a list that goes on behind the file's end is not."""
    monkeypatch.setattr("bitmill_common.gguf._READ_BYTES", piece)
    tokens = {"tokens": ["x" * (length + number % 5) for number in range(1100)]}
    path = write_gguf(tmp_path / NAME, {"before": 7, **tokens, "after": 8}, {"tensor": ("F32", (4,))})
    store = Stores([tmp_path.as_uri()]).open(tmp_path.as_uri(), "uri")
    header = read_gguf_header(store, store.head(NAME))
    assert (header.metadata, header.lengths) == ({"before": 7, "after": 8}, {"tokens": 1100})
    assert header.tensors["tensor"].shape == (4,)
    data = path.read_bytes()
    last = data.rindex(struct.pack("<Q", length + 1099 % 5) + b"x" * (length + 1099 % 5))
    path.write_bytes(data[:last] + struct.pack("<Q", 1 << 40) + data[last + 8 :])
    with pytest.raises(GgufError, match="goes on"):
        read_gguf_header(store, store.head(NAME))


def test_a_link_out_of_the_roots_is_not_followed(file: Path, tmp_path: Path) -> None:
    """Neither in a directory nor named itself."""
    root = tmp_path / "root"
    root.mkdir()
    (root / NAME).symlink_to(file)
    stores = Stores([root.as_uri()])
    for uri in (root.as_uri(), (root / NAME).as_uri()):
        with pytest.raises(Exception, match="roots"):
            inspect_source(stores.open(root.as_uri(), "uri"), NAME if uri.endswith(NAME) else "")
