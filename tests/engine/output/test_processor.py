"""Text, stop strings and terminals of one request and of many."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.messages import Finish, Step, ToApi, unpack_ints
from common.sampling import SamplingParams
from engine.loop import StopHit
from engine.output.processor import OutputProcessor
from engine.output.thread import InlineOutput, OutputThread
from engine.output.vocabulary import Vocabulary
from engine.plan import StepResult
from engine.request import Request
from engine.scheduler import Committed

EOS = 300


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Every byte is a token; 256 is 'stop', 257 ' here'; 300 is the end."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = {bytes([b]): ch for b, ch in _byte_names().items()}
    vocab = {names[bytes([b])]: b for b in range(256)}
    assert set(vocab) == set(alphabet)
    vocab |= {"stop": 256, "Ġhere": 257}
    vocab |= {f"<unused{i}>": i for i in range(258, 300)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Vocabulary.load(folder)


def _byte_names() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in printable}
    rest = [b for b in range(256) if b not in names]
    return names | {b: chr(256 + i) for i, b in enumerate(rest)}


class Bench:
    """A processor whose messages and stop hits are kept."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.sent: list[tuple[int, ToApi]] = []
        self.hits: list[StopHit] = []
        self.processor = OutputProcessor(
            vocabulary, 0, 1, lambda api, message: self.sent.append((api, message)), self.hits.append
        )

    def request(self, handle: int = 1, api_id: int = 1, **params: Any) -> Request:
        prompt = np.asarray([1, 2, 3], np.int32)
        return Request(api_id, handle, prompt, SamplingParams(**params), (EOS,), 100, (0, handle))

    def step(self, *tokens: tuple[Request, int, Finish], logprobs: dict[int, Any] | None = None) -> None:
        result = StepResult(1, 0, [], [], [], 0, 0, logprobs or {})
        committed = [Committed(r, token, finish, i) for i, (r, token, finish) in enumerate(tokens)]
        self.processor.step(result, committed, [])

    def feed(self, request: Request, data: bytes) -> None:
        for byte in data:
            self.step((request, byte, Finish.NONE))

    def text(self, handle: int = 1) -> str:
        return "".join(
            step.texts[index]
            for _, step in self.sent
            if isinstance(step, Step)
            for index, h in enumerate(unpack_ints("I", step.handles))
            if h == handle
        )

    def finishes(self, handle: int = 1) -> list[tuple[Finish, Any]]:
        return [
            (Finish(step.finishes[index]), step.extras.get(index))
            for _, step in self.sent
            if isinstance(step, Step)
            for index, h in enumerate(unpack_ints("I", step.handles))
            if h == handle and step.finishes[index]
        ]


@pytest.fixture
def bench(vocabulary: Vocabulary) -> Bench:
    return Bench(vocabulary)


def test_token_ids_and_text_arrive_and_characters_stay_whole(bench: Bench) -> None:
    request = bench.request()
    bench.feed(request, "né 日🙂".encode())
    assert bench.text() == "né 日🙂"
    assert all("�" not in message.texts[0] for _, message in bench.sent if isinstance(message, Step))


def test_an_end_token_counts_but_shows_no_text(bench: Bench) -> None:
    request = bench.request()
    bench.feed(request, b"hi")
    bench.step((request, EOS, Finish.STOP))
    ((finish, extra),) = bench.finishes()
    assert (bench.text(), finish, extra.usage, extra.stop) == ("hi", Finish.STOP, (3, 3, 0), None)
    assert not bench.hits, "the loop knows already"


def test_a_stop_token_id_is_named_as_the_reason(bench: Bench) -> None:
    request = bench.request(stop_token_ids=(65,))
    bench.step((request, 65, Finish.STOP))
    ((_, extra),) = bench.finishes()
    assert extra.stop == 65


def test_a_stop_string_ends_the_request_and_tells_the_loop(bench: Bench) -> None:
    request = bench.request(stop=("stop here",))
    bench.feed(request, b"a ")
    bench.step((request, 256, Finish.NONE))
    bench.step((request, 257, Finish.NONE))
    ((finish, extra),) = bench.finishes()
    assert (bench.text(), finish, extra.stop) == ("a ", Finish.STOP, "stop here")
    assert [hit.request for hit in bench.hits] == [request]


def test_a_stop_string_beats_an_end_that_comes_later(bench: Bench) -> None:
    request = bench.request(stop=("b",))
    bench.feed(request, b"ab")
    bench.feed(request, b"cd")
    bench.step((request, EOS, Finish.STOP))
    assert bench.text() == "a"
    assert len(bench.finishes()) == 1
    assert bench.finishes()[0][1].usage == (3, 2, 0)


def test_a_stop_string_in_the_last_token_of_all_is_a_stop(bench: Bench) -> None:
    request = bench.request(stop=("b",))
    bench.step((request, ord("a"), Finish.NONE))
    bench.step((request, ord("b"), Finish.LENGTH))
    assert bench.finishes()[0][0] is Finish.STOP


def test_what_was_held_back_for_a_stop_string_comes_at_the_end(bench: Bench) -> None:
    request = bench.request(stop=("abc",))
    bench.feed(request, b"xa")
    assert bench.text() == "x"
    bench.step((request, ord("b"), Finish.LENGTH))
    assert bench.text() == "xab"


def test_stop_strings_are_not_seen_before_min_tokens(bench: Bench) -> None:
    request = bench.request(stop=("a",), min_tokens=2)
    bench.feed(request, b"aaba")
    assert bench.text() == "aab"


def test_a_character_cut_by_the_end_is_shown_as_far_as_it_goes(bench: Bench) -> None:
    request = bench.request()
    data = "日".encode()
    bench.step((request, data[0], Finish.NONE))
    bench.step((request, data[1], Finish.LENGTH))
    assert bench.text() == "�"


def test_a_request_ends_once_whatever_follows(bench: Bench) -> None:
    request = bench.request()
    bench.processor.end(request, Finish.ABORT)
    bench.processor.end(request, Finish.ERROR, "late")
    bench.step((request, 65, Finish.LENGTH))
    assert [finish for finish, _ in bench.finishes()] == [Finish.ABORT]


def test_a_refused_request_gets_its_reason(bench: Bench) -> None:
    bench.processor.end(bench.request(), Finish.ERROR, "too long")
    ((finish, extra),) = bench.finishes()
    assert (finish, extra.error, extra.usage) == (Finish.ERROR, "too long", (3, 0, 0))


def test_each_api_process_gets_one_message_a_step(bench: Bench) -> None:
    one, two, three = bench.request(1, 1), bench.request(2, 2), bench.request(3, 1)
    bench.step((one, 65, Finish.NONE), (two, 66, Finish.NONE), (three, 67, Finish.NONE))
    messages = {api: message for api, message in bench.sent if isinstance(message, Step)}
    assert len(bench.sent) == 2
    assert unpack_ints("I", messages[1].handles) == [1, 3]
    assert unpack_ints("i", messages[1].token_ids) == [65, 67]
    assert messages[2].texts == ["B"]


def test_an_error_in_one_requests_output_ends_that_one_alone(bench: Bench) -> None:
    bad, good = bench.request(1), bench.request(2)
    bench.step((bad, 10**9, Finish.NONE), (good, 65, Finish.NONE))
    assert bench.text(2) == "A"
    assert not bench.finishes(2)


def test_logprobs_come_with_their_token(bench: Bench) -> None:
    request = bench.request(logprobs=1)
    bench.step((request, 65, Finish.NONE), logprobs={0: (65, -0.5, [(66, -0.1)])})
    (_, message) = bench.sent[0]
    assert isinstance(message, Step)
    assert message.extras[0].logprobs == [("A", -0.5, b"A", [("B", -0.1, b"B", 66)])]


def test_prompt_logprobs_come_once_with_the_first_token_even_after_a_preemption(bench: Bench) -> None:
    request = bench.request(prompt_logprobs=0)
    scores: list[tuple[Request, Any]] = [(request, (1, [(2, -1.0, [])])), (request, (2, [(3, -2.0, [])]))]
    result = StepResult(1, 0, [], [], [], 0, 0)
    bench.processor.step(result, [], scores)
    bench.step((request, 65, Finish.NONE))
    bench.processor.step(result, [], scores)
    bench.step((request, 66, Finish.LENGTH))
    steps = [message for _, message in bench.sent if isinstance(message, Step)]
    sent = [step.extras[0].prompt_logprobs for step in steps if step.extras and step.extras[0].prompt_logprobs]
    assert sent == [[None, ("\x02", -1.0, b"\x02", []), ("\x03", -2.0, b"\x03", [])]]


def test_a_resumed_request_sends_only_what_the_client_has_not(bench: Bench) -> None:
    request = bench.request(stop=("cd",))
    request.resumed, request.delivered = list(b"abc"), 1
    bench.step((request, ord("e"), Finish.NONE))
    assert bench.text() == "bce"
    bench.step((request, ord("c"), Finish.NONE))
    bench.step((request, ord("d"), Finish.NONE))
    ((finish, extra),) = bench.finishes()
    assert (bench.text(), finish, extra.usage) == ("bce", Finish.STOP, (3, 6, 0))


def test_the_thread_and_the_loop_run_the_same_processor(bench: Bench) -> None:
    request = bench.request()
    result = StepResult(1, 0, [], [], [], 0, 0)
    thread = OutputThread(bench.processor, lambda: False, lambda failed: None)
    thread.start()
    thread.step(result, [Committed(request, 65, Finish.NONE, 0)], [])
    thread.end(request, Finish.ABORT)
    done: SimpleQueue[str] = SimpleQueue()
    thread.stop(lambda: done.put("last"))
    assert done.get(timeout=5) == "last"
    inline = InlineOutput(bench.processor, lambda: False, lambda event: None)
    other = bench.request(2)
    inline.step(result, [Committed(other, 66, Finish.NONE, 0)], [])
    inline.end(other, Finish.ABORT)
    assert (bench.text(1), bench.text(2)) == ("A", "B")


def test_the_thread_tries_again_while_a_peer_is_busy() -> None:
    tries: SimpleQueue[int] = SimpleQueue()
    answers = iter([True, True, False])

    def idle() -> bool:
        tries.put(1)
        return next(answers, False)

    thread = OutputThread(None, idle, lambda failed: None)  # type: ignore[arg-type]
    thread.start()
    thread.call(lambda: None)
    for _ in range(3):
        tries.get(timeout=5)
    thread.stop(lambda: None)


def test_a_failure_of_the_thread_itself_is_heard_of() -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    thread = OutputThread(None, lambda: False, heard.put)  # type: ignore[arg-type]
    thread.start()
    thread.call(lambda: [][0])
    assert isinstance(heard.get(timeout=5).error, IndexError)
