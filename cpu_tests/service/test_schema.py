import json

import pytest

from scalerun.service.errors import ApiError
from scalerun.service.schema import MAX_CHOICES, MAX_STOPS, CompletionRequest, parse_request

WRONG = {
    "prompt is missing": ({"prompt": None}, "prompt"),
    "prompt is a number": ({"prompt": 3}, "prompt"),
    "prompt is true": ({"prompt": True}, "prompt"),
    "prompt is an object": ({"prompt": {"text": "a"}}, "prompt"),
    "prompt is an empty list": ({"prompt": []}, "prompt"),
    "prompt mixes texts and ids": ({"prompt": ["a", 1]}, "prompt"),
    "prompt mixes ids and lists": ({"prompt": [1, [2]]}, "prompt"),
    "prompt is nested too deeply": ({"prompt": [[[1]]]}, "prompt"),
    "prompt has a fraction": ({"prompt": [1.5]}, "prompt"),
    "prompt has a bool": ({"prompt": [1, True]}, "prompt"),
    "prompt has a null": ({"prompt": ["a", None]}, "prompt"),
    "prompt has half a character": ({"prompt": "\ud800"}, "prompt"),
    "max_tokens is a text": ({"max_tokens": "5"}, "max_tokens"),
    "max_tokens is a fraction": ({"max_tokens": 5.5}, "max_tokens"),
    "max_tokens is true": ({"max_tokens": True}, "max_tokens"),
    "max_tokens is negative": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens is 0 without echo": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens is a list": ({"max_tokens": [5]}, "max_tokens"),
    "min_tokens is negative": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens is above max_tokens": ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    "temperature is a text": ({"temperature": "hot"}, "temperature"),
    "temperature is negative": ({"temperature": -0.1}, "temperature"),
    "temperature is too large for a float": ({"temperature": 10**400}, "temperature"),
    "top_p is 0": ({"top_p": 0}, "top_p"),
    "top_p is above 1": ({"top_p": 1.1}, "top_p"),
    "top_k is negative": ({"top_k": -1}, "top_k"),
    "top_k is a fraction": ({"top_k": 0.5}, "top_k"),
    "min_p is above 1": ({"min_p": 2}, "min_p"),
    "repetition_penalty is tiny": ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    "a null of an unknown name": ({"zzz": None}, "zzz"),
    "repetition_penalty is 0": ({"repetition_penalty": 0}, "repetition_penalty"),
    "presence_penalty is above 2": ({"presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty is below -2": ({"frequency_penalty": -3}, "frequency_penalty"),
    "n is 0": ({"n": 0}, "n"),
    "n is too large": ({"n": MAX_CHOICES + 1}, "n"),
    "best_of is below n": ({"n": 2, "best_of": 1}, "best_of"),
    "best_of in a stream": ({"best_of": 2, "stream": True}, "best_of"),
    "logprobs is true": ({"logprobs": True}, "logprobs"),
    "logprobs is negative": ({"logprobs": -1}, "logprobs"),
    "echo is a text": ({"echo": "yes"}, "echo"),
    "stop is a number": ({"stop": 1}, "stop"),
    "stop has an empty text": ({"stop": ["a", ""]}, "stop"),
    "stop has a number": ({"stop": ["a", 1]}, "stop"),
    "stop has too many texts": ({"stop": ["a"] * (MAX_STOPS + 1)}, "stop"),
    "truncate_prompt is a text": ({"truncate_prompt": "yes"}, "truncate_prompt"),
    "seed is a text": ({"seed": "1"}, "seed"),
    "seed is negative": ({"seed": -1}, "seed"),
    "seed has too many digits": ({"seed": 10**30}, "seed"),
    "stream is 1": ({"stream": 1}, "stream"),
    "stream_options without a stream": ({"stream_options": {}}, "stream_options"),
    "stream_options is a text": ({"stream": True, "stream_options": "usage"}, "stream_options"),
    "include_usage is a text": (
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
    ),
    "stream_options has something else": (
        {"stream": True, "stream_options": {"colour": 1}},
        "stream_options.colour",
    ),
    "user is a number": ({"user": 1}, "user"),
    "model is a number": ({"model": 1}, "model"),
    "logit_bias": ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    "suffix": ({"suffix": " end"}, "suffix"),
    "an unknown field": ({"tempreature": 1}, "tempreature"),
    "metaseq's penalty": ({"alpha_presence": 0.5}, "alpha_presence"),
}


@pytest.mark.parametrize(("change", "param"), WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_refused_by_its_name(change, param):
    with pytest.raises(ApiError) as caught:
        parse_request(json.dumps({"prompt": "a", **change}).encode())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(f"{param}: ")
    assert "pydantic" not in caught.value.message


NO_JSON = {
    "nothing": b"",
    "a piece": b'{"prompt": "a"',
    "a word": b"prompt",
    "not UTF-8": b'{"prompt": "\xff"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a form": b"prompt=a&max_tokens=5",
}
NO_OBJECT = {"a list": b"[]", "a text": b'"a"', "a number": b"3", "null": b"null"}


@pytest.mark.parametrize("body", [*NO_JSON.values(), *NO_OBJECT.values()], ids=NO_JSON | NO_OBJECT)
def test_a_body_that_is_no_object_of_json_is_refused(body):
    with pytest.raises(ApiError, match="body") as caught:
        parse_request(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_each_form_of_a_prompt_is_understood(prompt, prompts):
    assert parse_request(json.dumps({"prompt": prompt}).encode()).prompts == prompts


def test_null_is_the_default():
    names = [name for name in CompletionRequest.model_fields if name != "prompt"]
    body = {"prompt": "a", **dict.fromkeys(names)}
    assert parse_request(json.dumps(body).encode()) == parse_request(b'{"prompt": "a"}')


def test_a_whole_number_is_a_temperature():
    assert parse_request(b'{"prompt": "a", "temperature": 1}').temperature == 1.0


def test_a_long_name_of_a_field_is_not_repeated_whole():
    with pytest.raises(ApiError) as caught:
        parse_request(json.dumps({"prompt": "a", "x" * 10_000: 1}).encode())
    assert len(caught.value.message) < 200
