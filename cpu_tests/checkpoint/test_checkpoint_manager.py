import logging
import threading

import pytest
import torch
from torch import nn

from scalerun.checkpoint import checkpoint_manager as module
from scalerun.checkpoint.manifest import read_manifest
from scalerun.dataclass.errors import UserError
from scalerun.optim.adam import AdamConfig
from scalerun.optim.base_optimizer import build_optimizer


def names(run_dir):
    return sorted(entry.name for entry in run_dir.iterdir())


@pytest.mark.parametrize("save_async", [True, False])
def test_what_was_saved_is_loaded_to_the_bit(manager, save_async):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
        optimizer = build_optimizer(AdamConfig(), model.named_parameters())
        optimizer.set_lr(0.1)
        return model, optimizer, {"model": model, "optimizer": optimizer}

    def update(model, optimizer):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, state = build(1)
    update(model, optimizer)
    manager(save_async=save_async).save(1, state, final=True)
    other, other_optimizer, other_state = build(2)
    assert manager().load_latest(other_state).num_updates == 1
    for one in (model, other):
        update(one, optimizer if one is model else other_optimizer)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, other_optimizer.state_dict()[name])


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(
    manager, state_at, number_of, monkeypatch
):
    go = threading.Event()
    write = module.write_checkpoint
    monkeypatch.setattr(module, "write_checkpoint", lambda *a: go.wait(10) and write(*a))
    made, state = manager(), state_at(1)
    made.save(1, state)
    state["model"].state["embed.weight"].zero_()
    state["optimizer"].state["embed.weight.exp_avg"].zero_()
    state["trainer"].state["num_updates"] = 99
    go.set()
    made.wait()
    loaded = state_at(0)
    manager().load_latest(loaded)
    assert number_of(loaded) == 1


def test_at_most_one_save_is_being_written(manager, state_at, monkeypatch):
    writing, most = [], []
    write = module.write_checkpoint

    def spy(folder, content, control):
        writing.append(content.num_updates)
        most.append(len(writing))
        result = write(folder, content, control)
        writing.pop()
        return result

    monkeypatch.setattr(module, "write_checkpoint", spy)
    made = manager()
    for number in range(1, 6):
        made.save(number, state_at(number))
    made.close()
    assert most == [1] * 5


@pytest.mark.parametrize("surface", ["save", "poll", "wait", "close"])
def test_an_error_of_the_writing_thread_comes_up_at_the_next_call(
    manager, state_at, monkeypatch, surface
):
    def fail(*args):
        raise OSError(5, "Input/output error")

    made = manager()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_checkpoint", fail)
        made.save(1, state_at(1))
        made._executor.shutdown()
    call = {"save": lambda: made.save(2, state_at(2))}.get(surface, getattr(made, surface))
    with pytest.raises(UserError, match=r"checkpoint_1 could not be written .*Input/output error"):
        call()
    made.wait()


def test_events_tell_what_happened_on_the_callers_thread(manager, state_at, flip_byte, run_dir):
    events = []

    def on_event(event):
        assert threading.current_thread() is threading.main_thread()
        events.append(event)

    made = manager(on_event=on_event)
    made.save(1, state_at(1))
    made.save(2, state_at(2))
    made.close()
    flip_byte(run_dir / "checkpoint_2" / "__0_0.distcp")
    manager(on_event=on_event).load_latest(state_at(0))
    assert all(event["kind"] == "event" for event in events)
    assert [(e["event"], e["checkpoint"].rpartition("/")[2]) for e in events] == [
        ("saved", "checkpoint_1"),
        ("saved", "checkpoint_2"),
        ("damaged", "checkpoint_2"),
        ("resumed", "checkpoint_1"),
    ]
    assert events[0]["num_updates"] == 1
    assert events[0]["bytes"] > 0
    assert 0 <= events[0]["seconds_held_up"] <= events[0]["seconds"]


def test_last_and_best_are_pointed_at_after_every_save(manager, state_at, run_dir):
    made = manager()
    for number, metric in ((1, 3.0), (2, 2.0), (3, float("nan")), (4, 2.5), (5, None)):
        made.save(number, state_at(number), metric=metric)
        made.wait()
        assert (run_dir / "checkpoint_last").read_text() == f"checkpoint_{number}\n"
        best = f"checkpoint_{min(number, 2)}\n"
        assert (run_dir / "checkpoint_best").read_text() == best
    assert made.best_metric() == 2.0


def test_larger_is_better_when_asked_for(manager, state_at, run_dir):
    made = manager(maximize_best_checkpoint_metric=True)
    for number, metric in ((1, 3.0), (2, 2.0)):
        made.save(number, state_at(number), metric=metric, final=True)
    assert (run_dir / "checkpoint_best").read_text() == "checkpoint_1\n"


def test_retention_counts_across_restarts_and_spares_the_best(manager, state_at, run_dir):
    for start in (1, 4):
        made = manager(keep_last_updates=2)
        for number in range(start, start + 3):
            made.save(number, state_at(number), metric=float(abs(number - 2)))
        made.close()
    assert [n for n in names(run_dir) if n[-1].isdigit()] == [
        "checkpoint_2",
        "checkpoint_5",
        "checkpoint_6",
    ]


def test_epoch_ends_and_updates_are_kept_by_their_own_limits(manager, state_at, run_dir):
    made = manager(keep_last_updates=1, keep_last_epochs=1, save_interval_updates=2)
    for number in range(1, 9):
        made.save(number, state_at(number), epoch_end=number // 3 if number % 3 == 0 else None)
    made.close()
    assert [n for n in names(run_dir) if n[-1].isdigit()] == ["checkpoint_6", "checkpoint_8"]


def test_a_saved_update_is_not_saved_again(manager, state_at, run_dir):
    events = []
    made = manager(on_event=events.append)
    made.save(1, state_at(1), final=True)
    stamp = (run_dir / "checkpoint_1" / "__0_0.distcp").stat().st_mtime_ns
    made.save(1, state_at(1), final=True)
    manager(on_event=events.append).save(1, state_at(1), final=True)
    assert (run_dir / "checkpoint_1" / "__0_0.distcp").stat().st_mtime_ns == stamp
    assert [event["event"] for event in events] == ["saved"]


def test_news_of_a_saved_update_is_noted(manager, state_at, run_dir):
    made = manager()
    made.save(1, state_at(1))
    made.save(1, state_at(1), metric=0.5, epoch_end=1)
    manifest = read_manifest(run_dir / "checkpoint_1")
    assert (manifest.metric, manifest.epoch_end, manifest.kinds) == (0.5, 1, ["epoch", "update"])
    assert (run_dir / "checkpoint_best").read_text() == "checkpoint_1\n"
    assert manager().load_latest(state_at(0)).epoch_end == 1


def test_a_damaged_checkpoint_whose_name_is_needed_is_kept_aside(
    manager, state_at, number_of, saved, flip_byte, run_dir
):
    saved(1, 2)
    flip_byte(run_dir / "checkpoint_2" / "state.json")
    made = manager()
    assert made.load_latest(state_at(0)).num_updates == 1
    assert (run_dir / "checkpoint_last").read_text() == "checkpoint_1\n"
    made.save(2, state_at(2), final=True)
    assert "checkpoint_2.damaged" in names(run_dir)
    state = state_at(0)
    assert manager().load_latest(state).num_updates == number_of(state) == 2


def test_a_fresh_run_finds_nothing(manager, state_at):
    assert manager().load_latest(state_at(0)) is None


def test_own_checkpoints_go_before_the_restore_file(manager, state_at, number_of, saved, tmp_path):
    run = saved(5)
    state = state_at(0)
    other = manager(save_dir=tmp_path / "other", restore_file=str(run))
    loaded = other.load_latest(state)
    assert loaded.restored
    assert loaded.num_updates == number_of(state) == 5
    other.save(6, state_at(6), final=True)
    loaded = manager(save_dir=tmp_path / "other", restore_file="gone").load_latest(state)
    assert not loaded.restored
    assert loaded.num_updates == 6


def test_a_mistyped_restore_file_is_fatal(manager, state_at, tmp_path):
    with pytest.raises(UserError, match=r"--restore-file .*runn does not exist"):
        manager(restore_file=str(tmp_path / "runn")).load_latest(state_at(0))


def test_parts_can_be_skipped_or_be_optional(manager, state_at, saved, Box, caplog, tmp_path):
    run = saved(3)
    state = state_at(0) | {"ema": Box({"w": torch.zeros(2)})}
    says = r"has no ema \(it has model, optimizer, trainer\): .*; start a new run from it"
    with pytest.raises(UserError, match=says):
        manager().load_latest(state)
    optimizer = state["optimizer"].state
    other = manager(save_dir=tmp_path / "other", restore_file=str(run))
    loaded = other.load_latest(state, skip={"optimizer"}, optional={"ema"})
    assert loaded.missing == {"ema"}
    assert state["optimizer"].state is optimizer
    assert state["trainer"].state["num_updates"] == 3
    assert loaded.state["trainer"]["nested"] == {"third": 1.0}
    del state["ema"], state["optimizer"]
    with caplog.at_level(logging.WARNING):
        manager().load_latest(state)
    assert "also has optimizer, which this run does not use" in caplog.text


def test_a_model_to_fine_tune_gives_its_weights_and_nothing_else(
    manager, state_at, number_of, saved, Box, tmp_path
):
    run, events = saved(3), []
    state = state_at(0) | {"lr_scheduler": Box({}), "ema": Box({"w": torch.zeros(2)})}
    other = manager(
        save_dir=tmp_path / "other", finetune_from_model=str(run), on_event=events.append
    )
    loaded = other.load_latest(state, skip={"criterion"}, optional={"ema"})
    assert loaded.restored
    assert loaded.missing == {"ema"}
    assert (state["model"].state["embed.weight"] == 3).all()
    assert state["trainer"].state["num_updates"] == 0
    assert (state["optimizer"].state["embed.weight.exp_avg"] == 0).all()
    assert [event["num_updates"] for event in events] == [0]
    other.save(6, state_at(6), final=True)
    own = manager(save_dir=tmp_path / "other", finetune_from_model="gone")
    state = state_at(0)
    assert not own.load_latest(state).restored
    assert number_of(state) == 6
    with pytest.raises(UserError, match=r"--finetune-from-model .*gone does not exist"):
        manager(save_dir=tmp_path / "third", finetune_from_model="gone").load_latest(state)


def test_a_part_that_another_runs_checkpoint_lacks_may_be_skipped(
    manager, state_at, saved, Box, tmp_path
):
    run = saved(3)
    state = state_at(0) | {"architecture": Box({"settings": {}})}
    with pytest.raises(UserError, match="has no architecture .* --restore-file OLD$"):
        manager().load_latest(state, skip={"architecture"})
    other = manager(save_dir=tmp_path / "other", restore_file=str(run))
    assert "architecture" not in other.load_latest(state, skip={"architecture"}).state


def test_an_absent_part_that_can_be_reset_names_the_flag(manager, state_at, saved, Box):
    saved(3)
    state = state_at(0) | {"loader": Box({"epoch": 1})}
    with pytest.raises(UserError, match="has no loader .* OLD --reset-dataloader$"):
        manager().load_latest(state)


def test_the_event_of_a_run_that_counts_anew_says_update_0(manager, state_at, saved, tmp_path):
    run, events = saved(3), []
    folder = {"save_dir": tmp_path / "other", "restore_file": str(run)}
    for skip in ({"lr_scheduler"}, {"optimizer"}):
        manager(**folder, on_event=events.append).load_latest(state_at(0), skip=skip)
    assert [event["num_updates"] for event in events] == [0, 3]


def test_a_runs_own_checkpoint_is_loaded_whole(manager, state_at, saved):
    """The command that reset a part when it began must not reset it again after a stop."""
    saved(3)
    state = state_at(0)
    optimizer = state["optimizer"].state
    loaded = manager(restore_file="gone").load_latest(state, skip={"optimizer"})
    assert not loaded.restored
    assert state["optimizer"].state is not optimizer


def test_without_saving_the_run_folder_is_not_touched(manager, state_at, run_dir):
    made = manager(no_save=True)
    made.save(1, state_at(1))
    made.close()
    assert not run_dir.exists()


def test_files_of_the_run_are_in_every_checkpoint(manager, state_at, run_dir, tmp_path):
    source = tmp_path / "vocab.json"
    source.write_text("{}")
    made = manager(run_files={"config.yaml": "a: 1\n", "tokenizer/vocab.json": source})
    source.unlink()
    made.save(1, state_at(1), final=True)
    assert (run_dir / "checkpoint_1/config.yaml").read_text() == "a: 1\n"
    assert (run_dir / "checkpoint_1/tokenizer/vocab.json").read_text() == "{}"


def test_an_unusual_float_comes_back(manager, Box):
    values = [0.1, 1e-310, float("inf"), float("-inf"), -0.0, 2**70, True, None]
    manager().save(1, {"trainer": Box({"values": values})}, final=True)
    box = Box({})
    manager().load_latest({"trainer": box})
    assert [repr(v) for v in box.state["values"]] == [repr(v) for v in values]
