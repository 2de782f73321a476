"""What ``scalerun.cli.convert`` can be told, and which flags belong to which direction."""

from __future__ import annotations

from dataclasses import dataclass

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass, option

SOURCES = ("torchscale", "hf", "metaseq")
TARGETS = ("hf",)


@dataclass
class ConvertConfig(ScalerunDataclass):
    """What ``scalerun.cli.convert`` can be told."""

    path: str = option(
        "",
        "what to convert: a file or a folder, or with --to a run or a checkpoint",
        positional=True,
    )
    input: str | None = option(None, "the same, as a flag")
    from_: str | None = option(None, "the library that made it", choices=SOURCES)
    to: str | None = option(None, "the library that a run is converted for", choices=TARGETS)
    output: str = option("", "folder to write; must be empty or new")
    torchscale_config: str | None = option(
        None, "YAML or JSON file of TorchScale's fields (default: those that fairseq recorded)"
    )
    torchscale_version: str | None = option(
        None, "TorchScale's version, where it matters", choices=("main", "0.3.0")
    )
    metaseq_config: str | None = option(
        None, "YAML or JSON file of metaseq's settings of the model (default: those recorded)"
    )
    tokenizer: str | None = option(
        None, "tokenizer of a decoder: bytes, a sentencepiece .model or a tokenizers .json file"
    )
    vocab_filename: str | None = option(None, "GPT-2 vocab.json, with --merges-filename")
    merges_filename: str | None = option(None, "GPT-2 merges.txt, with --vocab-filename")
    dict_: str | None = option(
        None, "fairseq's dict.txt, whose order the rows of the embedding have"
    )
    vocabulary: str | None = option(
        None,
        "folder of the binarised pairs that an encoder-decoder was trained on, with the dict.txt "
        "of each language",
    )
    source_lang: str | None = option(
        None, "its source (default: as the names of the folder's files say)", aliases=("-s",)
    )
    target_lang: str | None = option(None, "its target, with --source-lang", aliases=("-t",))
    allow_namespace: bool = option(
        False, "read the argparse.Namespace of an old checkpoint, as plain values"
    )
    use_ema: bool = option(False, "convert the averaged weights of --store-ema")

    def validate(self) -> None:
        if self.path and self.input is not None:
            raise ConfigError(f"{self.path} and --input {self.input} are two inputs; give one")
        if not self.source:
            raise ConfigError("the file to convert is missing: give it as the first argument")
        if (self.from_ is None) == (self.to is None):
            problem = "--from is required" if self.to is None else "--from and --to are given"
            raise ConfigError(
                f"{problem}: name the library that made the model (--from {', '.join(SOURCES)}) or "
                f"the one that it is for (--to {', '.join(TARGETS)})"
            )
        if not self.output:
            raise ConfigError("--output is required: the folder to write")
        self._check_used()
        if self.dict_ is not None and self.tokenizer is None:
            raise ConfigError("--dict needs the sentencepiece model that it lists: --tokenizer")
        if (self.source_lang is None) != (self.target_lang is None):
            raise ConfigError("--source-lang and --target-lang are given together")
        if self.source_lang is not None and self.vocabulary is None:
            raise ConfigError("--source-lang and --target-lang belong to --vocabulary")

    @property
    def source(self) -> str:
        """What to convert."""
        return self.input or self.path

    @property
    def direction(self) -> str:
        """The flag that says what is to be done."""
        return f"--from {self.from_}" if self.to is None else f"--to {self.to}"

    def _check_used(self) -> None:
        """Refuse flags that another direction has."""
        unset = ConvertConfig()
        for name, directions in USED_BY.items():
            if self.direction not in directions and getattr(self, name) != getattr(unset, name):
                flag = f"--{name.strip('_').replace('_', '-')}"
                raise ConfigError(
                    f"{flag} has no effect with {self.direction}, only with "
                    f"{' or '.join(directions)}; leave it out"
                )


USED_BY: dict[str, tuple[str, ...]] = {
    "torchscale_config": ("--from torchscale",),
    "torchscale_version": ("--from torchscale",),
    "metaseq_config": ("--from metaseq",),
    "tokenizer": ("--from torchscale", "--from hf", "--from metaseq"),
    "vocab_filename": ("--from hf", "--from metaseq"),
    "merges_filename": ("--from hf", "--from metaseq"),
    "dict_": ("--from torchscale",),
    "vocabulary": ("--from torchscale",),
    "source_lang": ("--from torchscale",),
    "target_lang": ("--from torchscale",),
    "allow_namespace": ("--from torchscale", "--from metaseq"),
    "use_ema": ("--to hf",),
}
"""The directions that flags count in."""
