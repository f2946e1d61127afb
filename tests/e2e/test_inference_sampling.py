"""What the sampling parameters do on the real engine, in streams and unary alike."""

from __future__ import annotations

import itertools
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from bitmill.inference.v1 import generation_pb2
from bitmill.inference.v1 import inference_service_pb2 as pb
from support.inference_process import InferenceProcess
from support.inference_serving import error_info, violations

PROMPT = "A generator is"
TIMEOUT_S = 60
Sampling = dict[str, Any]
GREEDY: Sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
# Characters of one to four bytes, joined ones and combined ones. None of them is one token of the tiny tokenizer.
TEXTS = ["naïve 😀 café", "日本語のテキスト。", "👩‍👩‍👧‍👦 e\u0301🇳🇱\u0928\u093f", "𝔘𝔫𝔦\u00a0\u2028 ❤️‍🔥"]


class Tiny:
    """Calls to the tiny model, each way."""

    def __init__(self, server: InferenceProcess) -> None:
        self._inference = server.inference

    def stream(self, prompt: str | list[int] = PROMPT, **sampling: Any) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(model="tiny", sampling_params=sampling, **_prompt(prompt))
        return list(self._inference.Generate(request, timeout=TIMEOUT_S))

    def unary(self, prompt: str | list[int] = PROMPT, **sampling: Any) -> pb.GenerateUnaryResponse:
        request = pb.GenerateUnaryRequest(model="tiny", sampling_params=sampling, **_prompt(prompt))
        return self._inference.GenerateUnary(request, timeout=TIMEOUT_S)

    def one(self, prompt: str | list[int] = PROMPT, **sampling: Any) -> pb.GeneratedSequence:
        return self.unary(prompt, **sampling).sequences[0]

    def ids(self, text: str) -> list[int]:
        request = pb.TokenizeRequest(model="tiny", text=text, add_special_tokens=False)
        return list(self._inference.Tokenize(request).token_ids)


def _prompt(prompt: str | list[int]) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}


@pytest.fixture(scope="module")
def tiny(inference_server: InferenceProcess) -> Tiny:
    return Tiny(inference_server)


def joined(chunks: list[pb.GenerateResponse]) -> pb.GenerateUnaryResponse:
    """The unary answer that the chunks make."""
    whole = pb.GenerateUnaryResponse(usage=chunks[-1].usage, prompt_logprobs=chunks[0].prompt_logprobs)
    for index, own in itertools.groupby(sorted(chunks, key=lambda chunk: chunk.index), lambda chunk: chunk.index):
        sequence = whole.sequences.add(index=index)
        for chunk in own:
            assert not sequence.HasField("finish"), "a chunk came after the last"
            sequence.text += chunk.text
            sequence.token_ids.extend(chunk.token_ids)
            sequence.logprobs.extend(chunk.logprobs)
            if chunk.HasField("finish"):
                sequence.finish.CopyFrom(chunk.finish)
    assert [chunk.HasField("usage") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return whole


@pytest.mark.parametrize(
    ("letters", "sampling"),
    [
        # Bytes at random: whole characters, halves of them, and what is none.
        *(("😀é日", {"seed": seed}) for seed in range(6)),
        *(("a\u0301🇳🇱", {"seed": seed, "stream_interval": 3}) for seed in range(3)),
        *(("é", {"seed": seed, "stop": ["é"]}) for seed in range(3)),
        *(("éa", {"seed": seed, "stop": ["ééa", "aaaa"]}) for seed in range(3)),
        ("éa", {"seed": 4, "stop": ["aa"], "include_stop_str_in_output": True}),
        # Special tokens in the middle.
        ("a<|im_start|><|im_end|>", {"seed": 1, "skip_special_tokens": False}),
        ("😀<|im_start|>", {"seed": 2, "skip_special_tokens": False, "spaces_between_special_tokens": False}),
        ("é<|im_start|><|im_end|>", {"seed": 3}),
        ("", {"seed": 9, "logprobs": 3, "prompt_logprobs": 2}),
        ("", {"seed": 9, "detokenize": False, "logprobs": 1}),
        ("", {"seed": 9, "logprob_token_ids": [9, 4]}),
    ],
)
def test_the_deltas_make_the_unary_answer_byte_for_byte(letters: str, sampling: Sampling, tiny: Tiny) -> None:
    """Text, token ids, log probabilities, end and usage, wherever characters and stop strings break into tokens."""
    allowed = tiny.ids(letters)
    assert len(allowed) >= len(letters.encode()) - letters.count("|>") * 11, "these are no single bytes"
    sampling = {"temperature": 1.5, "max_tokens": 48, "ignore_eos": True, "allowed_token_ids": allowed} | sampling
    unary = tiny.unary(**sampling)
    unary.request_id = ""
    assert joined(tiny.stream(**sampling)) == unary


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [False, True])
def test_a_text_arrives_whole_or_up_to_its_stop_string(text: str, stop: bool, tiny: Tiny) -> None:
    """However it breaks into tokens; of the stop string, not even a beginning."""
    end = len(text) * 2 // 3
    sampling: Sampling = {"structured_outputs": {"choice": {"texts": [text]}}, "max_tokens": 100}
    if stop:
        # The first makes the engine hold back; the second is what comes.
        sampling["stop"] = [f"{text[end:]}…and more", text[end:]]
    expected = text[:end] if stop else text
    unary = tiny.one(**sampling)
    (streamed,) = joined(tiny.stream(**sampling)).sequences
    assert (unary.text, streamed.text) == (expected, expected)
    assert unary.finish.reason == streamed.finish.reason == generation_pb2.FINISH_REASON_STOP
    assert unary.finish.stop_string == streamed.finish.stop_string == (text[end:] if stop else "")


def test_each_of_several_sequences_arrives_whole_with_its_own_index_and_end(tiny: Tiny) -> None:
    """The usage counts all of them, and the prompt once."""
    sampling: Sampling = {
        "structured_outputs": {"choice": {"texts": TEXTS}},
        "max_tokens": 100,
        "n": 8,
        "seed": 1,
        "logprobs": 1,
        "prompt_logprobs": 0,
    }
    prompt_tokens = len(tiny.ids(PROMPT))
    for answer in (joined(tiny.stream(**sampling)), tiny.unary(**sampling)):
        assert [sequence.index for sequence in answer.sequences] == list(range(8))
        assert {sequence.text for sequence in answer.sequences} <= set(TEXTS)
        assert len({sequence.text for sequence in answer.sequences}) > 1
        for sequence in answer.sequences:
            assert sequence.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
            assert [position.chosen.token_id for position in sequence.logprobs] == sequence.token_ids
        completion_tokens = sum(len(sequence.token_ids) for sequence in answer.sequences)
        assert answer.usage == generation_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        assert len(answer.prompt_logprobs) == prompt_tokens - 1


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_gives_the_same_text_again(seed: int, tiny: Tiny) -> None:
    """Any 64-bit number is one, and sequences of one call differ."""
    sampling: Sampling = {"temperature": 1, "seed": seed, "max_tokens": 8, "ignore_eos": True}
    first = tiny.one(**sampling)
    assert tiny.one(**sampling) == first
    assert tiny.one(**sampling | {"seed": 12345}).token_ids != first.token_ids
    one, two = tiny.unary(n=2, **sampling).sequences
    assert one.token_ids != two.token_ids


def test_log_probabilities_are_the_likeliest_in_order_and_the_chosen_one(tiny: Tiny) -> None:
    """With 0, the chosen one alone. Those of the prompt begin with its second token."""
    prompt = tiny.ids(PROMPT)
    answer = tiny.unary(prompt, **GREEDY, logprobs=3, prompt_logprobs=2)
    for positions, top in ((answer.sequences[0].logprobs, 3), (answer.prompt_logprobs, 2)):
        for position in positions:
            assert [entry.rank for entry in position.top] == list(range(1, top + 1))
            values = [entry.logprob for entry in position.top]
            assert values == sorted(values, reverse=True)
            assert all(value < 0 for value in values)
    assert [position.chosen.rank for position in answer.sequences[0].logprobs] == [1] * 12
    assert [position.chosen.token_id for position in answer.prompt_logprobs] == prompt[1:]
    alone = tiny.unary(prompt, **GREEDY, logprobs=0, prompt_logprobs=0)
    assert not any(position.top for position in (*alone.sequences[0].logprobs, *alone.prompt_logprobs))


def test_log_probabilities_of_given_tokens_come_in_the_order_asked_for(tiny: Tiny) -> None:
    """They are those that the likeliest would have had, and nobody else's answer changes for them."""
    likeliest = tiny.one(**GREEDY, logprobs=3).logprobs
    given = [entry.token_id for entry in reversed(likeliest[0].top)] * 2
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(tiny.one, **GREEDY, logprob_token_ids=given) for _ in range(3)]
        others = [pool.submit(tiny.one, **GREEDY, logprobs=3) for _ in range(3)]
        answers = [future.result().logprobs for future in asked]
        unharmed = [future.result().logprobs for future in others]
    for answer in answers:
        assert [entry.token_id for entry in answer[0].top] == given
        assert [entry.rank for entry in answer[0].top] == [0] * len(given)
        expected = {entry.token_id: entry.logprob for entry in likeliest[0].top}
        assert [entry.logprob for entry in answer[0].top] == pytest.approx([expected[each] for each in given], rel=0.01)
    for answer in unharmed:
        assert [[entry.rank for entry in position.top] for position in answer] == [[1, 2, 3]] * len(answer)


def test_tokens_are_biased_allowed_and_banned(tiny: Tiny) -> None:
    """By id and by word."""
    free = tiny.one(**GREEDY)
    first = free.token_ids[0]
    assert first not in tiny.one(**GREEDY, logit_bias={first: -100}).token_ids
    assert set(tiny.one(**GREEDY, logit_bias={first: 100}).token_ids) == {first}
    allowed = [token_id for token_id in range(70, 76) if token_id != first]
    assert set(tiny.one(**GREEDY, allowed_token_ids=allowed).token_ids) <= set(allowed)
    word = tiny.one(**GREEDY | {"max_tokens": 1}).text
    assert word.strip() in free.text
    assert word.strip() not in tiny.one(**GREEDY, bad_words=[word.strip()]).text


def test_a_sequence_goes_on_to_min_tokens_and_past_the_end_when_told(tiny: Tiny) -> None:
    """A stop token before that does not count."""
    first = tiny.one(**GREEDY).token_ids[0]
    stopped = tiny.one(temperature=0, max_tokens=12, stop_token_ids=[first])
    assert (list(stopped.token_ids), stopped.finish.stop_token_id) == ([first], first)
    later = tiny.one(temperature=0, max_tokens=12, stop_token_ids=[first], min_tokens=5)
    assert len(later.token_ids) >= 5
    end = {"temperature": 0, "max_tokens": 5, "logit_bias": {2: 100}}
    assert tiny.one(**end).finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_STOP)
    assert len(tiny.one(**end, ignore_eos=True).token_ids) == 5


def test_a_prompt_is_cut_to_its_last_tokens(tiny: Tiny) -> None:
    """Also one that would not fit."""
    ids = tiny.ids(PROMPT)
    cut = tiny.unary(**GREEDY, truncate_prompt_tokens=3)
    assert cut.usage.prompt_tokens == 3
    assert cut.sequences == tiny.unary(ids[-3:], **GREEDY).sequences
    long = tiny.unary("word " * 5000 + PROMPT, **GREEDY, truncate_prompt_tokens=len(ids) - 1)
    assert long.sequences == tiny.unary(ids[1:], **GREEDY).sequences
    with pytest.raises(grpc.RpcError) as caught:
        tiny.unary("word " * 5000, **GREEDY, truncate_prompt_tokens=512)
    assert violations(caught.value) == {"text": "PROMPT_TOO_LONG"}


def test_a_sequence_that_repeats_itself_ends(tiny: Tiny) -> None:
    """With a reason of its own."""
    sampling = {**GREEDY, "max_tokens": 100, "repetition_detection": {"max_pattern_size": 4, "min_count": 5}}
    repeating = tiny.one(**sampling, logit_bias={70: 100})
    assert repeating.finish == generation_pb2.Finish(reason=generation_pb2.FINISH_REASON_REPETITION)
    assert list(repeating.token_ids) == [70] * 5


def test_a_stream_waits_for_as_many_tokens_as_asked(tiny: Tiny) -> None:
    """The first comes at once, and the last with whatever is left."""
    chunks = tiny.stream(**GREEDY, stream_interval=4)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 12
    assert len(chunks[0].token_ids) == 1
    assert len(chunks) <= 5


def test_cached_tokens_are_counted_for_the_same_salt_alone(
    inference_server: InferenceProcess,
) -> None:
    """A prompt of more than one block; another salt finds nothing of it."""
    run = uuid.uuid4()

    def cached(salt: str, **sampling: Any) -> int:
        request = pb.GenerateUnaryRequest(
            model="tiny",
            token_ids={"ids": [3 + (place * 7) % 700 for place in range(200)]},
            sampling_params={"max_tokens": 1} | sampling,
            request_options={"cache_salt": f"{salt} {run}"},
        )
        return inference_server.inference.GenerateUnary(request, timeout=TIMEOUT_S).usage.cached_tokens

    assert cached("ours", n=3) == 0
    assert cached("ours") >= 128
    assert cached("ours", n=3) >= 128
    assert cached("theirs") == 0
    assert cached("ours", prompt_logprobs=0) == 0


@pytest.mark.parametrize(
    ("sampling", "code", "reason"),
    [
        ({"thinking_token_budget": 1}, grpc.StatusCode.FAILED_PRECONDITION, "REASONING_PARSER_MISSING"),
        ({"logit_bias": {768: 1}}, grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_OUT_OF_VOCABULARY"),
    ],
)
def test_what_this_model_cannot_do_is_refused_the_same_way_on_both_calls(
    sampling: Sampling, code: grpc.StatusCode, reason: str, tiny: Tiny
) -> None:
    """The engine serves on."""
    for call in (tiny.unary, tiny.stream):
        with pytest.raises(grpc.RpcError) as caught:
            call(**GREEDY, **sampling)
        assert (caught.value.code(), error_info(caught.value).reason) == (code, reason)
