import socket
import sys
from types import SimpleNamespace

import pytest
from torch import nn

from scalerun.cli.interactive_hosted import (
    HostedConfig,
    bound_socket,
    main,
    start_listening,
    url_of,
)
from scalerun.dataclass.errors import ConfigError, UserError


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"port": 65536}, "--port is 65536; give 0"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; give 1 or more"),
        ({"max_num_tokens": 0}, "--max-num-tokens is 0"),
        ({"max_queue": 0}, "--max-queue is 0"),
        ({"max_tokens_limit": 0}, "--max-tokens-limit is 0"),
        ({"max_body_bytes": 10}, "--max-body-bytes is 10; give 1024 or more"),
        ({"request_timeout": 0.0}, "--request-timeout is 0"),
        ({"request_timeout": float("inf")}, "--request-timeout is inf"),
        ({"shutdown_timeout": -1.0}, "--shutdown-timeout is -1"),
        ({"api_key": ""}, "--api-key is empty"),
        ({"served_model_name": ""}, "--served-model-name is empty"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        HostedConfig(path="run", **settings).validate()


def test_of_two_servers_that_load_at_the_same_time_one_gets_the_port():
    with bound_socket("127.0.0.1", 0) as first:
        second = bound_socket("127.0.0.1", first.getsockname()[1])
        start_listening(first)
        with second, pytest.raises(UserError, match="Address already in use"):
            start_listening(second)


def test_an_unknown_host_is_one_sentence():
    with pytest.raises(UserError, match="--host no.such.host.invalid is no address"):
        bound_socket("no.such.host.invalid", 0)


def test_no_checkpoint_is_one_sentence(run, tmp_path):
    command = run("interactive_hosted", "--path", tmp_path, "--cpu", "--port", 0)
    assert command.code == 1
    assert str(tmp_path) in command.error
    assert run("interactive_hosted").error == (
        "error: --path is required: a run folder or a checkpoint folder"
    )


def test_it_listens_at_this_host_alone_by_default():
    with bound_socket(HostedConfig().host, 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_one_sentence(run):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = run("interactive_hosted", "--path", "run", "--cpu", "--port", port)
    assert command.code == 1
    what = f"error: --host 127.0.0.1 --port {port} cannot be listened at: Address already in use"
    assert command.error.startswith(what)


@pytest.mark.parametrize(
    ("tokenizer", "says"), [(None, "has no tokenizer"), (object(), "Linear is no decoder")]
)
def test_a_model_that_continues_no_text_is_one_sentence(monkeypatch, tokenizer, says):
    loaded = SimpleNamespace(task=SimpleNamespace(tokenizer=tokenizer), model=nn.Linear(1, 1))
    monkeypatch.setattr("scalerun.cli.inference.load_for_inference", lambda *_, **__: loaded)
    with pytest.raises(UserError, match=says):
        main(["--path", "run", "--cpu", "--port", "0"])


def test_without_its_libraries_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scalerun.service.server", None)
    monkeypatch.setitem(sys.modules, "scalerun.service.application", None)
    with pytest.raises(UserError, match=r"install it with pip install --editable '\.\[serve\]'"):
        main(["--path", "run", "--cpu", "--port", "0"])
