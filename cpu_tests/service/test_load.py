"""Many clients at once, and clients that are killed: each has its own, and nothing is left."""

import json
import random
import statistics
import threading
import time

import openai
import pytest

from benchmarks.serving import tokens_per_second
from cpu_tests.service.conftest import LONG_ANSWER

PROMPTS = ["", "Line", "Line 3: the", "the owl sleeps.\n", "x" * 60]


def draw_options(number):
    """The request that a client makes as its n-th; the same for the same number."""
    draw = random.Random(number)
    options = {"max_new_tokens": draw.randint(1, 40), "seed": draw.randrange(1000)}
    options["temperature"] = draw.choice([0.0, 0.5, 1.0, 1.5])
    options["top_k"] = draw.choice([0, 1, 5, 40])
    options["top_p"] = draw.choice([0.5, 0.9, 1.0])
    options["repetition_penalty"] = draw.choice([1.0, 1.3])
    options["stop"] = draw.choice([(), ("e",), ("the", "\n")])
    options["echo"] = draw.random() < 0.2
    return draw.choice(PROMPTS), options


def ask(client, prompt, options, *, stream):
    body = {"model": "served", "prompt": prompt, "max_tokens": options["max_new_tokens"]}
    body |= {name: options[name] for name in ("temperature", "top_p", "seed", "echo")}
    body["stop"] = list(options["stop"])
    beyond = {name: options[name] for name in ("top_k", "repetition_penalty")}
    answer = client.completions.create(stream=stream, extra_body=beyond, **body)
    if not stream:
        return answer.choices[0].text, answer.choices[0].finish_reason
    pieces = [piece.choices[0] for piece in answer]
    return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


def load(server, *, num_clients, seconds, alone):
    """Let clients ask for a time, each something else; return how often they asked."""
    end = time.monotonic() + seconds
    answers, lock = [], threading.Lock()

    def work(number):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=120) as client:
            for turn in range(10_000):
                if time.monotonic() > end:
                    return
                # Numbers come back: what is compared is computed once.
                case = (number * 7 + turn) % 97
                stream = (number + turn) % 2 == 0
                prompt, options = draw_options(case)
                got = ask(client, prompt, options, stream=stream)
                with lock:
                    answers.append((case, got))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, got in answers:
        prompt, options = draw_options(case)
        expected = alone(prompt, **options)
        text = prompt * options["echo"] + expected.text
        assert got == (text, expected.finish_reason), (prompt, options)
    return len(answers)


def kill_clients(server, times):
    """Break streams off in their middle; seconds that a whole short request takes after each."""
    seconds = []
    for _ in range(times):
        body = {"prompt": "Line", "max_tokens": LONG_ANSWER, "stream": True, "temperature": 0}
        body["min_tokens"] = LONG_ANSWER
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        server.wait_until_idle()
        began = time.perf_counter()
        server.post({"prompt": "Line", "max_tokens": 8, "min_tokens": 8}).raise_for_status()
        seconds.append(time.perf_counter() - began)
    return seconds


def test_clients_side_by_side_get_what_each_gets_alone(server, alone):
    assert load(server, num_clients=8, seconds=3, alone=alone) >= 8


@pytest.mark.long
@pytest.mark.timeout(600)
def test_64_clients_for_a_minute_get_what_each_gets_alone(serving, alone):
    with serving("--max-queue", 64) as server:
        count = load(server, num_clients=64, seconds=60, alone=alone)
        server.wait_until_idle()
        assert count >= 64
        assert server.metric("scalerun_requests_total", route="/v1/completions") == count
        assert server.metric("scalerun_requests_total", status="200") >= count
        assert "Traceback" not in server.stderr


@pytest.mark.long
def test_a_hundred_killed_clients_leave_nothing_behind(serving):
    with serving() as server:
        kill_clients(server, 20)
        memory = server.metric("process_resident_memory_bytes")
        files = server.metric("process_open_fds")
        seconds = kill_clients(server, 100)
        assert server.metric("scalerun_requests_total", status="499") == 120
        assert server.metric("process_resident_memory_bytes") < memory + 20e6
        assert server.metric("process_open_fds") <= files + 2
        assert statistics.median(seconds[50:]) < 2 * statistics.median(seconds[:50]) + 0.05
        assert "Traceback" not in server.stderr


@pytest.mark.long
def test_sixteen_clients_get_four_times_the_tokens_of_one(serving):
    with serving() as server:

        def measured(num_clients):
            return tokens_per_second(
                server.url, num_clients=num_clients, seconds=1.5, num_tokens=64, stream=False
            )

        measured(1)
        # Rounds alternate, so that other work on the machine hits both.
        rates = [(measured(1), measured(16)) for _ in range(3)]
        ones, sixteens = zip(*rates, strict=True)
        assert max(sixteens) >= 4 * max(ones)
