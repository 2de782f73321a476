"""A server of a tiny model, as a real process."""

import contextlib
import functools
import re
import time

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from scalerun.cli.inference import load_for_inference
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.generation.sequence_generator import SequenceGenerator

LONG_ANSWER = 900
"""Tokens that take the tiny model long enough to do something meanwhile."""


class Server:
    """A running command, and what it says about itself."""

    def __init__(self, command):
        self.command = command
        self.url = ""

    def wait_until_it_serves(self, seconds=60):
        end = time.monotonic() + seconds
        while not (found := re.search(r"serving \S+ of update \d+ at (http\S+)", self.stderr)):
            assert self.command.poll() is None, self.stderr
            assert time.monotonic() < end, self.stderr
            time.sleep(0.02)
        self.url = found[1]
        return self

    @property
    def stderr(self):
        return self.command.stderr

    @functools.cached_property
    def http(self):
        """One client for all requests: to make one takes longer than most answers."""
        return httpx.Client(base_url=self.url, timeout=60)

    def get(self, path, **settings):
        return self.http.get(path, **settings)

    def post(self, body, path="/v1/completions", **settings):
        return self.http.post(path, json=body, **settings)

    def send(self, content):
        """A body as it is, which may be no JSON."""
        return self.http.post("/v1/completions", content=content)

    def streamed(self, body):
        """The data of all events of a stream."""
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    def metric(self, name, **labels):
        """The value of a sample; 0 where it has not been counted yet."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(found)

    def wait_until_idle(self, seconds=20):
        end = time.monotonic() + seconds
        while self.metric("scalerun_live_rows") or self.metric("scalerun_queue_length"):
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture(scope="session")
def served_run(undisturbed):
    """The run folder of what is served."""
    return undisturbed("served", ["--max-update", "40", "--no-save-async"])


@pytest.fixture(scope="session")
def serving(launch, served_run):
    """Start a server for the time of a block: ``with serving("--max-queue", 2) as server``."""

    @contextlib.contextmanager
    def serving(*flags, **options):
        words = ["--path", served_run, "--cpu", "--port", 0, *flags]
        command = launch(served_run.parent, "interactive_hosted", *words, **options)
        try:
            yield Server(command).wait_until_it_serves()
        finally:
            if command.poll() is None:
                command.kill()

    return serving


@pytest.fixture(scope="session")
def server(serving):
    """One server for all tests that leave it as it was."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def generator(served_run):
    """What answers prompts one by one, in this process."""
    loaded = load_for_inference(str(served_run), device=torch.device("cpu"))
    return SequenceGenerator(loaded.model, loaded.task.tokenizer)


@pytest.fixture(scope="session")
def alone(generator):
    """The answer to one prompt by itself: ``alone("The cat", max_new_tokens=3)``."""

    @functools.cache
    def alone(prompt, **params):
        tokens = generator.tokenizer.encode(prompt)
        [answer] = generator.generate([tokens], [SamplingParams(**params)])
        return answer

    return alone
