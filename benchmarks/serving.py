"""How much faster a server answers many clients than one.

Asks a running server, at one concurrency after the other, for answers of exactly the same length:
``python -m benchmarks.serving --url http://127.0.0.1:8000 --clients 1,16``.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from urllib.request import Request, urlopen


def ask(url: str, *, num_tokens: int, stream: bool) -> int:
    """Ask for one answer; return its tokens."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": num_tokens,
        "min_tokens": num_tokens,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"content-type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        if not stream:
            return int(json.load(answer)["usage"]["completion_tokens"])
        events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: ")]
    return int(json.loads(events[-2])["usage"]["completion_tokens"])


def tokens_per_second(
    url: str, *, num_clients: int, seconds: float, num_tokens: int, stream: bool
) -> float:
    """New tokens a second of all clients together, each asking again as soon as it is answered."""
    done: list[int] = []
    began = time.perf_counter()

    def work() -> None:
        while time.perf_counter() - began < seconds:
            done.append(ask(url, num_tokens=num_tokens, stream=stream))

    threads = [threading.Thread(target=work) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", default="1,16", help="numbers of clients, the base first")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3, help="of each, alternating")
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args(argv)
    counts = [int(count) for count in options.clients.split(",")]
    ask(options.url, num_tokens=options.num_tokens, stream=options.stream)
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    best = dict.fromkeys(counts, 0.0)
    for _ in range(options.rounds):
        for count in counts:
            rate = tokens_per_second(
                options.url,
                num_clients=count,
                seconds=options.seconds,
                num_tokens=options.num_tokens,
                stream=options.stream,
            )
            best[count] = max(best[count], rate)
    for count in counts:
        ratio = best[count] / best[counts[0]]
        print(f"{count:4d} clients: {best[count]:8.0f} tokens/s, {ratio:5.2f} times")


if __name__ == "__main__":
    main()
