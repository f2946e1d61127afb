"""How the llmcompressor engine makes calibration samples of text and chats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bitmill_engine_kit.builtin_text import calibration_documents, held_out_documents
from bitmill_engine_kit.calibration import Samples, build_samples, pack
from bitmill_engine_kit.protocol import Calibration, EngineError


class CharacterTokenizer:
    """One token for each character, and a template that knows two roles."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        assert tokenize
        marks = {"user": "U", "assistant": "A"}
        return self.encode("".join(f"{marks[message['role']]}{message['content']};" for message in conversation))


def build(path: Path | None, num_samples: int, length: int = 16, seed: int = 0) -> Samples:
    return build_samples(Calibration(path, num_samples, length), CharacterTokenizer(), seed)


def texts(samples: Samples) -> list[str]:
    return ["".join(map(chr, sample)) for sample in samples.token_ids]


def test_documents_are_packed_end_to_end() -> None:
    """Samples have exactly the length asked for; documents run on into the next one and the rest is dropped."""
    packed = pack(iter([[1, 2], [3], [], [4, 5, 6, 7, 8]]), length=3)
    assert [list(sample) for sample in packed] == [[1, 2, 3], [4, 5, 6]]


def test_text_fills_samples_in_an_order_that_the_seed_decides(tmp_path: Path) -> None:
    """Another seed gives the same samples in another order, and so another digest."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"sample number {number:02}" for number in range(40)))
    first, same, other = (build(path, num_samples=30, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first.digest == same.digest
    assert sorted(texts(first)) == sorted(texts(other))
    assert texts(first) != texts(other)
    assert first.digest != other.digest
    assert first.num_tokens == 480


def test_the_digest_depends_on_where_samples_are_cut(tmp_path: Path) -> None:
    """Equal tokens in samples of another length are other samples."""
    path = tmp_path / "text.txt"
    path.write_text("a" * 64)
    assert build(path, num_samples=4, length=16).digest != build(path, num_samples=2, length=32).digest


def test_characters_on_the_border_of_two_blocks_are_read_whole(tmp_path: Path) -> None:
    """A text larger than one read, of characters that take three bytes."""
    path = tmp_path / "text.txt"
    path.write_text("€" * 100_000, encoding="utf-8")
    assert set("".join(texts(build(path, num_samples=6000)))) == {"€"}


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    """One conversation a line; blank lines and other fields are nothing."""
    path = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "12345", "id": 1}, {"role": "assistant", "content": "abcdefg"}]
    path.write_text(f"\n{json.dumps({'messages': messages})}\n\n")
    assert texts(build(path, num_samples=1)) == ["U12345;Aabcdefg;"]


def test_too_little_text_says_how_much_there_is(tmp_path: Path) -> None:
    """With the numbers in the details."""
    path = tmp_path / "text.txt"
    path.write_text("a" * 47)
    with pytest.raises(EngineError, match=r"text.txt holds 2 samples of 16 tokens; 3 are asked for") as raised:
        build(path, num_samples=3)
    assert raised.value.reason == "CALIBRATION_TOO_SMALL"
    assert raised.value.metadata == {"available_samples": "2", "num_samples": "3", "max_sequence_length": "16"}


def test_an_empty_file_is_too_small(tmp_path: Path) -> None:
    """And not a crash."""
    (tmp_path / "text.txt").touch()
    (tmp_path / "chats.jsonl").touch()
    for name in ("text.txt", "chats.jsonl"):
        with pytest.raises(EngineError, match="holds 0 samples"):
            build(tmp_path / name, num_samples=1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'has no non-empty list "messages"'),
        (b'{"text": "hello"}', 'has no non-empty list "messages"'),
        (b'{"messages": []}', 'has no non-empty list "messages"'),
        (b'{"messages": ["hello"]}', "at position 0"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', "at position 1"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "at position 0"),
        (b'{"messages": [{"role": "wizard", "content": "a"}]}', "does not fit the chat template"),
    ],
)
def test_a_malformed_chat_line_is_named_by_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    """Counted from one, as editors count."""
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "a"}]}\n\n' + line + b"\n")
    with pytest.raises(EngineError, match=problem) as raised:
        build(path, num_samples=1)
    assert raised.value.reason == "CALIBRATION_INVALID"
    assert raised.value.metadata == {"file": "chats.jsonl", "line": "3"}


@pytest.mark.parametrize("tail", [b"\xff\n", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path: Path, tail: bytes) -> None:
    """Whether a byte is wrong or the file ends within a character."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"first\nsecond\n" + tail)
    with pytest.raises(EngineError, match="is not UTF-8") as raised:
        build(path, num_samples=1)
    assert raised.value.reason == "CALIBRATION_INVALID"
    assert raised.value.metadata["line"] == "3"


def test_the_built_in_text_suffices_for_the_default_calibration() -> None:
    """512 samples of 2048 tokens, at the four characters that an English token has."""
    assert build(None, num_samples=512, length=2048 * 4).num_tokens == 512 * 2048 * 4


def test_held_out_text_is_never_calibrated_with() -> None:
    """No document but a stub is in both parts, whichever the seed; there is enough for large evaluations."""
    held_out = {document for document in held_out_documents() if len(document) > 100}
    for seed in (0, 1):
        assert held_out.isdisjoint(calibration_documents(seed))
    assert sum(map(len, held_out)) > 1 << 20


def test_small_calibrations_see_documentation_only() -> None:
    """Prose comes before source code."""
    assert not any("import " in document[:200] for document in islice(calibration_documents(seed=0), 60))
