"""How engines make calibration samples of text, chats, texts and token ids."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bitmill_engine_kit.builtin_text import calibration_documents, held_out_documents
from bitmill_engine_kit.calibration import Samples, build_samples, pack
from bitmill_engine_kit.protocol import Calibration, EngineError


class CharacterTokenizer:
    """One token for each character, a template that knows two roles, and a mark before a document where one is set."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in (self.mark if add_special_tokens else "") + text]

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 127}

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
        assert tokenize
        marks = {"user": "U", "assistant": "A"}
        return self.encode("".join(f"{marks[message['role']]}{message['content']};" for message in conversation))


def build(
    path: Path | None,
    num_samples: int,
    length: int = 16,
    seed: int = 0,
    packing: str = "CONCATENATE",
    tokenizer: CharacterTokenizer | None = None,
) -> Samples:
    calibration = Calibration(path, num_samples, length, packing)
    return build_samples(calibration, tokenizer or CharacterTokenizer(), seed)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


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


def test_texts_and_token_ids_are_documents_as_chats_are(tmp_path: Path) -> None:
    """Texts are tokenized with the model's special tokens; ids are taken as they are."""
    texts_path = write_lines(tmp_path / "texts.jsonl", {"text": "1234567", "id": 3}, {"text": "abcdefg"})
    assert texts(build(texts_path, num_samples=1, tokenizer=CharacterTokenizer("^"))) == ["^1234567^abcdefg"]
    ids_path = write_lines(tmp_path / "ids.jsonl", {"input_ids": [0, 127] * 4}, {"input_ids": list(range(8))})
    assert [list(sample) for sample in build(ids_path, num_samples=1).token_ids] == [[0, 127] * 4 + list(range(8))]


def test_documents_are_counted_as_far_as_samples_needed_them(tmp_path: Path) -> None:
    """Empty ones are none; the last one counts though a part of it is left over."""
    path = write_lines(tmp_path / "texts.jsonl", *({"text": text} for text in ("", "a" * 10, "", "b" * 10, "c" * 10)))
    samples = build(path, num_samples=1)
    assert texts(samples) == ["aaaaaaaaaabbbbbb"]
    assert samples.result(["model.layers.0.mlp.experts.3.up_proj"]) == {
        "digest": samples.digest,
        "num_samples": 1,
        "num_tokens": 16,
        "num_documents": 2,
        "uncalibrated_modules": ["model.layers.0.mlp.experts.3.up_proj"],
    }


def test_truncated_documents_are_samples_of_their_own(tmp_path: Path) -> None:
    """Long ones are cut off, those under 16 tokens left out; batches hold samples of one length."""
    given = ["a" * 40, "b" * 15, "c" * 16, "d" * 20, "e" * 33, "f" * 16]
    path = write_lines(tmp_path / "texts.jsonl", *({"text": text} for text in given))
    samples = build(path, num_samples=5, length=32, packing="TRUNCATE")
    assert sorted(texts(samples)) == ["a" * 32, "c" * 16, "d" * 20, "e" * 32, "f" * 16]
    assert (samples.num_documents, samples.num_tokens, samples.max_length) == (5, 116, 32)
    batches = list(samples.batches(2))
    assert sorted(len(batch) for batch in batches) == [1, 2, 2]
    assert all(len({len(sample) for sample in batch}) == 1 for batch in batches)
    assert samples == build(path, num_samples=5, length=32, packing="TRUNCATE")


def test_too_few_documents_to_truncate_say_how_many_there_are(tmp_path: Path) -> None:
    """Those that are too short are not among them."""
    path = write_lines(tmp_path / "texts.jsonl", {"text": "a" * 40}, {"text": "b" * 15})
    with pytest.raises(EngineError, match="holds 1 documents of at least 16 tokens; 2 are asked for") as raised:
        build(path, num_samples=2, packing="TRUNCATE")
    assert raised.value.reason == "CALIBRATION_TOO_SMALL"


def test_equal_samples_in_another_order_make_equal_batches_of_equal_lengths() -> None:
    """Samples of one length are batched in their order."""
    samples = Samples(tuple(array("I", [number] * 4) for number in range(5)))
    assert [[sample[0] for sample in batch] for batch in samples.batches(2)] == [[0, 1], [2, 3], [4]]


def test_paragraphs_are_the_documents_of_a_truncated_text(tmp_path: Path) -> None:
    """Blank lines separate them, whatever ends a line; a byte-order mark is nothing."""
    path = tmp_path / "text.txt"
    path.write_bytes("\ufefffirst paragraph of\r\ntwo lines\r\n \r\n\r\nsecond paragraph\n".encode())
    samples = build(path, num_samples=2, length=64, packing="TRUNCATE", tokenizer=CharacterTokenizer("^"))
    assert sorted(texts(samples)) == ["^first paragraph of\r\ntwo lines\r\n", "^second paragraph\n"]


def test_a_text_laid_end_to_end_is_one_document_however_large(tmp_path: Path) -> None:
    """It is read in blocks, cut where a line ends, and only its beginning has the special tokens of one."""
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeff".encode() + b"123456 89abcde\n" * 10_000)
    samples = build(path, num_samples=9_000, tokenizer=CharacterTokenizer("^"))
    assert sum(text.count("^") for text in texts(samples)) == 1
    assert "\ufeff" not in "".join(texts(samples))
    assert samples.num_documents == 1


def test_blocks_are_cut_between_words(tmp_path: Path) -> None:
    """Or the tokenizer would see halves of them."""
    path = tmp_path / "text.txt"
    path.write_text("0123456789 " * 20_000)
    seen: list[str] = []

    class Recorder(CharacterTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            seen.append(text)
            return super().encode(text)

    build(path, num_samples=10_000, tokenizer=Recorder())
    assert len(seen) > 2
    assert all(text.startswith(" 0123456789 ") for text in seen[1:])


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    """A large file costs no more than its beginning, and no more memory than its largest line."""
    path = tmp_path / "texts.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "0123456789abcdef"}\n' * 4)
        file.truncate(1 << 40)  # a terabyte of zeros, none of which is on the disk
    assert build(path, num_samples=4).num_documents == 4
    with pytest.raises(EngineError, match="line 5 makes a document of more than 64 MiB"):
        build(path, num_samples=5)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([{"text": "a"}, {"messages": [{"role": "user", "content": "a"}]}], "has messages where line 1 has text"),
        ([{"input_ids": [1]}, {"text": "a"}], "has text where line 1 has input_ids"),
        ([{"text": "a"}, {"text": "a", "input_ids": [1]}], "has text and input_ids of"),
        ([{"text": "a"}, {"text": None}], '"text" that is not a string'),
        ([{"text": "a"}, {"text": "\ud800"}], "not Unicode"),
        ([{"input_ids": [1]}, {"input_ids": "1"}], "not a list"),
        ([{"input_ids": [1]}, {"input_ids": [1, 128]}], "has 128 at position 1, which is no token id below 128"),
        ([{"input_ids": [1]}, {"input_ids": [-1]}], "has -1 at position 0"),
        ([{"input_ids": [1]}, {"input_ids": [1.0]}], "has 1.0 at position 0"),
        ([{"input_ids": [1]}, {"input_ids": [True]}], "has true at position 0"),
    ],
)
def test_a_line_that_is_wrong_or_of_another_kind_is_named(tmp_path: Path, lines: list[object], problem: str) -> None:
    """All lines are of one kind, and ids are those of the tokenizer's vocabulary."""
    with pytest.raises(EngineError, match=problem) as raised:
        build(write_lines(tmp_path / "mixed.jsonl", *lines), num_samples=1)
    assert raised.value.reason == "CALIBRATION_INVALID"
    assert raised.value.metadata == {"file": "mixed.jsonl", "line": "2"}


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
        (b"[]", "has none of messages, text, input_ids"),
        (b'{"text": "hello"}', "has text where line 1 has messages"),
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


@pytest.mark.parametrize("packing", ["CONCATENATE", "TRUNCATE"])
@pytest.mark.parametrize("tail", [b"\xff\n", b"\xe2\x82"])
def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path: Path, tail: bytes, packing: str) -> None:
    """Whether a byte is wrong or the file ends within a character."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"first\nsecond\n" + tail)
    with pytest.raises(EngineError, match="is not UTF-8") as raised:
        build(path, num_samples=1, packing=packing)
    assert raised.value.reason == "CALIBRATION_INVALID"
    assert raised.value.metadata["line"] == "3"


def test_the_built_in_text_suffices_for_the_default_calibration() -> None:
    """512 samples of 2048 tokens, at the four characters that an English token has, however they are packed."""
    assert build(None, num_samples=512, length=2048 * 4).num_tokens == 512 * 2048 * 4
    assert build(None, num_samples=512, length=2048 * 4, packing="TRUNCATE").num_documents == 512


def test_held_out_text_is_never_calibrated_with() -> None:
    """No document but a stub is in both parts, whichever the seed; there is enough for large evaluations."""
    held_out = {document for document in held_out_documents() if len(document) > 100}
    for seed in (0, 1):
        assert held_out.isdisjoint(calibration_documents(seed))
    assert sum(map(len, held_out)) > 1 << 20


def test_small_calibrations_see_documentation_only() -> None:
    """Prose comes before source code."""
    assert not any("import " in document[:200] for document in islice(calibration_documents(seed=0), 60))
