import asyncio
import json
import re
from types import SimpleNamespace

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cpu_tests.service.test_schema import NO_JSON, NO_OBJECT, WRONG
from scalerun.service.application import ALIASES, Service, ServiceLimits, build_application
from scalerun.service.metrics import ServiceMetrics
from scalerun.service.schema import Model

INTERNALS = re.compile(r"Traceback|\.py\b|pydantic|starlette|scalerun\.|/tmp|0x[0-9a-f]{6}", re.I)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_gets_the_text_of_the_generator(client, alone):
    answer = client.completions.create(
        model="served", prompt="Line 3: the", max_tokens=12, temperature=0
    )
    expected = alone("Line 3: the", max_new_tokens=12, temperature=0.0)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert (answer.object, answer.model) == ("text_completion", "served")
    assert answer.usage.prompt_tokens == 11
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == 11 + len(expected.tokens)


def test_openais_client_streams_the_same_text(client, alone):
    asked = {"prompt": "Line", "max_tokens": 30, "seed": 5, "temperature": 0.9}
    stream = client.completions.create(
        model="served", stream=True, stream_options={"include_usage": True}, **asked
    )
    *pieces, last = list(stream)
    expected = alone("Line", max_new_tokens=30, seed=5, temperature=0.9)
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == expected.finish_reason
    assert {piece.id for piece in pieces} == {last.id}
    assert len(pieces) > 2
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.tokens)


def test_openais_client_lists_the_model(client):
    [model] = client.models.list().data
    assert (model.id, model.object) == ("served", "model")
    assert client.models.retrieve("served").id == "served"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("davinci")


def test_openais_client_hears_which_field_is_wrong(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="served", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-3.5-turbo-instruct", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_choices_of_all_prompts_are_numbered_through(client, alone):
    prompts = ["Line 1", "", "the owl"]
    asked = {"max_tokens": 6, "seed": 3}
    answer = client.completions.create(model="served", prompt=prompts, n=2, **asked)
    assert [choice.index for choice in answer.choices] == list(range(6))
    firsts = [choice.text for choice in answer.choices[::2]]
    assert firsts == [alone(prompt, max_new_tokens=6, seed=3).text for prompt in prompts]
    pieces = client.completions.create(model="served", prompt=prompts, n=2, stream=True, **asked)
    streamed = [""] * 6
    for piece in pieces:
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]


def test_ids_give_the_answer_of_their_text(client, generator):
    ids = generator.tokenizer.encode("the cat")
    asked = {"model": "served", "max_tokens": 5, "temperature": 0}
    of_text = client.completions.create(prompt="the cat", **asked).choices[0].text
    answer = client.completions.create(prompt=[ids, ids], **asked)
    assert [choice.text for choice in answer.choices] == [of_text] * 2
    assert client.completions.create(prompt=ids, **asked).choices[0].text == of_text


def test_logprobs_belong_to_the_tokens(client, alone):
    asked = {"model": "served", "prompt": "Line", "max_tokens": 8, "seed": 2}
    answer = client.completions.create(logprobs=3, **asked)
    expected = alone("Line", max_new_tokens=8, seed=2)
    told = answer.choices[0].logprobs
    assert told.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert "".join(told.tokens) == expected.text
    assert told.text_offset == list(range(len(expected.tokens)))
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert len(top) in (3, 4)
        assert top[token] == logprob
    pieces = list(client.completions.create(logprobs=3, stream=True, **asked))
    streamed = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs]
    assert [each.tokens[0] for each in streamed] == told.tokens
    assert [each.top_logprobs[0] for each in streamed] == [
        pytest.approx(top, abs=1e-4) for top in told.top_logprobs
    ]


def test_offsets_point_at_the_tokens_of_a_stop_text_and_of_long_characters(client):
    answer = client.completions.create(
        model="served", prompt="åé", max_tokens=0, echo=True, logprobs=0
    )
    told = answer.choices[0].logprobs
    assert told.tokens == ["<0xC3>", "<0xA5>", "<0xC3>", "<0xA9>"]
    assert told.text_offset == [0, 0, 1, 1]
    asked = {"model": "served", "prompt": "Line 3", "temperature": 0, "logprobs": 0}
    text = client.completions.create(max_tokens=8, **asked).choices[0].text
    [choice] = client.completions.create(max_tokens=8, stop=text[4:6], **asked).choices
    before = text.split(text[4:6])[0]
    assert choice.finish_reason == "stop"
    assert choice.text == before
    assert "".join(choice.logprobs.tokens) == before + text[4:6]
    assert choice.logprobs.text_offset[-2:] == [len(before)] * 2


def test_echo_gives_the_prompt_and_its_score(client):
    asked = {"model": "served", "prompt": "Line 3", "temperature": 0, "logprobs": 2}
    plain = client.completions.create(max_tokens=4, **asked).choices[0]
    scored = client.completions.create(max_tokens=0, echo=True, **asked).choices[0]
    both = client.completions.create(max_tokens=4, echo=True, **asked).choices[0]
    assert both.text == "Line 3" + plain.text
    assert scored.text == "Line 3"
    assert scored.finish_reason == "length"
    assert both.logprobs.tokens == [*"Line 3", *plain.logprobs.tokens]
    assert len(scored.logprobs.token_logprobs) == 6
    assert both.logprobs.token_logprobs == pytest.approx(
        scored.logprobs.token_logprobs + plain.logprobs.token_logprobs, abs=1e-4
    )
    assert both.logprobs.text_offset == list(range(10))
    stream = client.completions.create(max_tokens=4, echo=True, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in stream) == both.text


def test_the_best_of_several_are_the_likeliest(client):
    asked = {"model": "served", "prompt": "Line", "max_tokens": 6, "seed": 1, "logprobs": 0}
    asked["extra_body"] = {"min_tokens": 6}
    drawn = client.completions.create(n=4, **asked)
    best = client.completions.create(n=1, best_of=4, **asked)
    score = lambda choice: sum(choice.logprobs.token_logprobs)  # noqa: E731
    assert best.choices[0].text == max(drawn.choices, key=score).text
    assert best.usage.completion_tokens == 24


def test_parameters_beyond_openais_reach_the_rules(client):
    asked = {"model": "served", "prompt": "Line", "max_tokens": 20}
    greedy = client.completions.create(temperature=0, **asked).choices[0].text
    for extra in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert client.completions.create(extra_body=extra, **asked).choices[0].text == greedy
    other = client.completions.create(
        temperature=0, presence_penalty=2, frequency_penalty=2, **asked
    )
    assert other.choices[0].text != greedy
    other = client.completions.create(
        temperature=0, extra_body={"repetition_penalty": 9.0}, **asked
    )
    assert other.choices[0].text != greedy


@pytest.mark.parametrize("path", [path.format(engine="any") for path in ALIASES])
def test_metaseqs_paths_lead_to_the_same(server, path):
    body = {"prompt": "Line", "max_tokens": 5, "temperature": 0}
    [choice] = server.post(body, path).json()["choices"]
    assert choice == server.post(body).json()["choices"][0]


@pytest.mark.parametrize(("change", "param"), WRONG.values(), ids=WRONG)
def test_a_malformed_body_is_a_400_with_the_fields_name(server, change, param):
    body = json.dumps({"prompt": "a", **change})
    answer = server.send(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not INTERNALS.search(answer.text)


@pytest.mark.parametrize("body", [*NO_JSON.values(), *NO_OBJECT.values()], ids=NO_JSON | NO_OBJECT)
def test_a_body_that_is_no_json_object_is_a_400(server, body):
    answer = server.send(body)
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]
    assert not INTERNALS.search(answer.text)


IMPOSSIBLE = {
    "a token beyond the vocabulary": ({"prompt": [99999]}, "prompt"),
    "a negative token": ({"prompt": [-1]}, "prompt"),
    "a prompt longer than the context": ({"prompt": "a" * 3000}, "prompt"),
    "more than the context has room for": ({"prompt": "a" * 900, "max_tokens": 500}, "max_tokens"),
    "more than the server allows": ({"max_tokens": 5000}, "max_tokens"),
    "too many answers": ({"n": 100}, "n"),
    "too many to choose from": ({"best_of": 100}, "best_of"),
    "too many alternatives": ({"logprobs": 10_000}, "logprobs"),
    "too many prompts": ({"prompt": ["a"] * 1000}, "prompt"),
}


@pytest.mark.parametrize(("change", "param"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_the_model_cannot_do_is_a_400_with_the_fields_name(server, change, param):
    answer = server.post({"prompt": "a", **change})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "--" not in error["message"]
    assert not INTERNALS.search(answer.text)


def test_the_beginning_of_a_long_prompt_can_be_dropped(server):
    body = {"prompt": "a" * 3000, "max_tokens": 24, "truncate_prompt": True}
    answer = server.post(body).json()
    assert answer["usage"]["prompt_tokens"] == 1000


def test_other_paths_and_methods_are_refused_as_json(server):
    assert server.get("/nothing").json()["error"]["type"] == "invalid_request_error"
    assert server.get("/nothing").status_code == 404
    assert server.get("/v1/completions").status_code == 405
    assert server.get("/v1/completions").headers["allow"] == "POST"
    assert server.get("/docs").status_code == 404


def test_pages_of_other_sites_are_refused(server):
    answer = server.post({"prompt": "a"}, headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 403
    assert server.post({"prompt": "a"}, headers={"sec-fetch-site": "same-origin"}).is_success


def test_metrics_count_requests_and_tokens(server):
    before = server.metric("scalerun_generated_tokens_total")
    wrong = {"route": "/v1/completions", "status": "400"}
    refused = server.metric("scalerun_requests_total", **wrong)
    server.post({"prompt": "Line", "max_tokens": 7, "min_tokens": 7})
    server.post({"prompt": "Line", "best_of": 3, "max_tokens": 5, "min_tokens": 5})
    server.post({"prompt": 3})
    assert server.metric("scalerun_generated_tokens_total") - before == 7 + 15
    assert server.metric("scalerun_requests_total", **wrong) == refused + 1
    text = server.get("/metrics").text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {
        "scalerun_requests",
        "scalerun_queue_length",
        "scalerun_live_rows",
        "scalerun_prompt_tokens",
        "scalerun_generated_tokens",
        "scalerun_time_to_first_token_seconds",
        "scalerun_time_per_token_seconds",
        "process_resident_memory_bytes",
    } <= names


def test_paths_that_lead_nowhere_do_not_fill_the_metrics(server):
    for i in range(20):
        server.get(f"/nothing/{i}")
    assert server.metric("scalerun_requests_total", route="other") >= 20
    assert "/nothing" not in server.get("/metrics").text


def test_health_says_that_all_is_well(server):
    answer = server.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_mistake_of_the_server_tells_nothing_of_its_inside():
    service = Service(
        SimpleNamespace(engine=None),  # whatever it is asked for raises AttributeError
        model=Model(id="served", created=1, max_model_len=None),
        limits=ServiceLimits(max_tokens=100, max_body_bytes=1000, request_seconds=10),
        metrics=ServiceMetrics(),
    )

    async def ask():
        transport = httpx.ASGITransport(build_application(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/completions", json={"prompt": "a"})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-should-retry"] == "false"
    assert not INTERNALS.search(answer.text)
    assert "Attribute" not in answer.text
    [counted] = [s for m in service.metrics.requests.collect() for s in m.samples]
    assert counted.labels == {"route": "/v1/completions", "status": "500"}
