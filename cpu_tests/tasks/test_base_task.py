import pytest
import torch

from scalerun.data.length_batches import BatchLimits
from scalerun.data.tokenizers.byte_tokenizer import ByteTokenizer
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.distributed.mesh import ModelMeshes
from scalerun.tasks import base_task
from scalerun.tasks.base_task import BaseTask, UnknownVocabulary


class Task(BaseTask):
    def __init__(self, cfg=None):
        super().__init__(cfg)
        self.tokenizer = ByteTokenizer()
        self.dictionary = self.tokenizer.dictionary
        self.read = []

    @classmethod
    def setup_task(cls, cfg, *, seed, cache_dir, quarantine):
        return cls(cfg)

    def read_dataset(self, split, *, training):
        self.read.append((split, training))
        return object()

    def valid_subsets(self, names):
        return list(names)


def test_a_dataset_is_built_once_for_each_use():
    task = Task()
    for _ in range(2):
        task.load_dataset("train")
        task.load_dataset("train", training=False)
        task.load_dataset("valid")
    assert task.read == [("train", True), ("train", False), ("valid", False)]


def test_the_model_is_built_for_the_vocabulary(monkeypatch):
    seen = {}

    class Model:
        def max_positions(self):
            return 32

    def build(cfg, **options):
        seen.update(options)
        return Model()

    monkeypatch.setattr(base_task, "build_model", build)
    task = Task()
    task.sequence_length = 32
    task.build_model(None, seed=7, device=torch.device("cpu"))
    expected = {"vocab_size": 264, "padding_idx": 257, "seed": 7, "device": torch.device("cpu")}
    assert seen.items() >= expected.items()

    task.sequence_length = 33
    with pytest.raises(ConfigError, match="--tokens-per-sample 33 is above the model's 32"):
        task.build_model(None, seed=7, device=torch.device("cpu"))


def test_sequences_that_the_ranks_cannot_cut_are_refused(monkeypatch):
    class Axis:
        def size(self):
            return 2

    class Model:
        def max_positions(self):
            return None

        def slice_length(self, num_tokens):
            return -(-num_tokens // 16) * 8

    monkeypatch.setattr(base_task, "build_model", lambda cfg, **options: Model())
    task = Task()
    options = {"seed": 7, "device": torch.device("cpu"), "meshes": ModelMeshes(sequence=Axis())}
    task.sequence_length = 64
    task.build_model(None, **options)
    task.sequence_length = 60
    with pytest.raises(ConfigError, match=r"--seq-parallel-size 2 cannot cut .* 60 .* is 64"):
        task.build_model(None, **options)


def test_sequences_that_the_ranks_cannot_spread_are_refused():
    class Axis:
        def size(self):
            return 2

    task = Task()
    meshes = ModelMeshes(tensor=Axis(), sequence_parallel=True)
    task.sequence_length = 33
    task.check_meshes(ModelMeshes(tensor=Axis()))
    with pytest.raises(ConfigError, match="--sequence-parallel cannot spread --tokens-per-sample"):
        task.build_model(None, seed=7, device=torch.device("cpu"), meshes=meshes)
    task.sequence_length = 32
    task.check_meshes(meshes)


def test_a_checkpoint_of_another_vocabulary_is_refused():
    task = Task()
    task.load_state_dict(task.state_dict())
    with pytest.raises(UserError, match="another vocabulary"):
        task.load_state_dict({**task.state_dict(), "vocabulary": "x"})


def test_a_checkpoint_that_does_not_know_its_vocabulary_is_taken_on_trust(caplog):
    Task().load_state_dict(UnknownVocabulary(264).state_dict())
    assert "only that it has 264 symbols" in caplog.text


def test_tokens_of_a_batch_are_refused_where_nothing_counts_them():
    task = Task(ScalerunDataclass().named("mine"))
    sentences, tokens = BatchLimits(max_sentences=4), BatchLimits(max_tokens=4)
    task.set_batch_limits(train=sentences, valid=sentences)
    for limits in ({"train": tokens, "valid": sentences}, {"train": sentences, "valid": tokens}):
        with pytest.raises(ConfigError, match="--max-tokens is for sequences .* --task mine does"):
            task.set_batch_limits(**limits)
