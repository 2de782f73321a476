import json
import signal
import socket
import threading
import time

import openai
import pytest

from cpu_tests.service.conftest import LONG_ANSWER

LONG = {"prompt": "Line", "max_tokens": LONG_ANSWER, "min_tokens": LONG_ANSWER}


def send_raw(server, body, path="/v1/completions"):
    """A request on a connection of its own, whose answer is not read."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def wait_until_live(server, count=1, seconds=20):
    end = time.monotonic() + seconds
    while server.metric("scalerun_live_rows") < count:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_only_who_shows_the_key_is_let_in(serving):
    env = {"SCALERUN_API_KEY": "sesam"}
    with serving("--served-model-name", "sesam/öffne", env=env) as server:
        assert "without an API key" not in server.stderr
        body = {"prompt": "a", "max_tokens": 2}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesam"}):
            answer = server.post(body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert server.get("/v1/models", headers=headers).status_code == 401
            assert server.post(body, "/completions", headers=headers).status_code == 401
        assert server.post({"prompt": 3}).status_code == 401  # a stranger learns nothing
        for path in ("/", "/health", "/metrics"):
            assert server.get(path).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesam", max_retries=0) as client:
            assert client.models.list().data[0].id == "sesam/öffne"
            assert client.models.retrieve("sesam/öffne").id == "sesam/öffne"
            assert client.completions.create(model="sesam/öffne", **body).choices[0].text


def test_limits_hold(serving):
    flags = ["--max-num-seqs", 2, "--max-queue", 2, "--max-body-bytes", 2000]
    with serving(*flags, "--max-tokens-limit", LONG_ANSWER) as server:
        answer = server.post({"prompt": "a" * 2000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"

        def pieces():
            yield b'{"prompt": "'
            for _ in range(100):
                yield b"a" * 1000

        answer = server.send(pieces())
        assert answer.status_code == 413
        running = [send_raw(server, LONG) for _ in range(2)]
        wait_until_live(server, 2)
        waiting = send_raw(server, {"prompt": ["a", "b"], "max_tokens": 2})
        while server.metric("scalerun_queue_length") < 2:
            time.sleep(0.01)
        answer = server.post({"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert server.metric("scalerun_requests_refused_total") == 1
        for connection in (*running, waiting):
            connection.close()
        server.wait_until_idle()
        assert server.post({"prompt": ["a", "b"], "max_tokens": 2}).status_code == 200


def test_an_answer_that_takes_too_long_is_broken_off(serving):
    with serving("--request-timeout", 0.3) as server:
        answer = server.post(LONG)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        *pieces, last = server.streamed({**LONG, "stream": True})
        assert json.loads(last)["error"]["code"] == "timeout"
        assert pieces
        server.wait_until_idle()
        assert server.metric("scalerun_generated_tokens_total") < 2 * LONG_ANSWER
        # A body that does not come is no reason to wait for ever either.
        connection = send_raw(server, {})
        connection.close()
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
            slow.settimeout(20)
            assert slow.recv(100).startswith(b"HTTP/1.1 504")


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_waits_for_is_cancelled(server, stream):
    server.wait_until_idle()
    before = server.metric("scalerun_generated_tokens_total")
    left = server.metric("scalerun_requests_total", status="499")
    for _ in range(5):
        connection = send_raw(server, {**LONG, "stream": stream})
        if stream:
            connection.recv(300)
        wait_until_live(server)
        connection.close()
        server.wait_until_idle()
    assert server.metric("scalerun_requests_total", status="499") - left == 5
    assert server.metric("scalerun_generated_tokens_total") - before < 5 * LONG_ANSWER


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_answers_end_and_takes_no_more(serving, signum, code):
    with serving("--shutdown-timeout", 60) as server:
        answers = {}

        def ask(name, stream):
            body = {**LONG, "temperature": 0, "stream": stream}
            answers[name] = server.streamed(body) if stream else server.post(body)

        threads = [threading.Thread(target=ask, args=each) for each in (("a", True), ("b", False))]
        idle = send_raw(server, {})  # a connection that stays open and wants nothing more
        idle.recv(1000)
        for thread in threads:
            thread.start()
        wait_until_live(server, 2)
        server.command.send(signum)
        with pytest.raises(ConnectionRefusedError):
            while True:
                send_raw(server, {}).close()
                time.sleep(0.01)
        for thread in threads:
            thread.join()
        assert server.command.wait() == code
        assert answers["a"][-1] == "[DONE]"
        text = "".join(json.loads(each)["choices"][0]["text"] for each in answers["a"][:-1])
        assert answers["b"].json()["choices"][0]["text"] == text
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize(("timeout", "num_signals"), [(0.1, 1), (60, 2)])
def test_what_does_not_end_in_time_is_broken_off_and_told(serving, timeout, num_signals):
    with serving("--shutdown-timeout", timeout) as server:
        found = []
        body = {**LONG, "n": 4, "stream": True}
        thread = threading.Thread(target=lambda: found.extend(server.streamed(body)))
        thread.start()
        wait_until_live(server, 4)
        for _ in range(num_signals):
            server.command.send(signal.SIGTERM)
            time.sleep(0.1)
        thread.join()
        assert json.loads(found[-1])["error"]["code"] == "stopping"
        assert server.command.wait() == 0
        assert "Traceback" not in server.stderr


def test_a_server_without_requests_rests(server):
    server.wait_until_idle()
    before = server.metric("process_cpu_seconds_total")
    time.sleep(1)
    assert server.metric("process_cpu_seconds_total") - before < 0.15
