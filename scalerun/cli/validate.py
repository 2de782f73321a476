"""Score a checkpoint on validation sets: ``python -m scalerun.cli.validate DATA --path RUN``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scalerun.cli.entry import run_cli
from scalerun.cli.inference_config import InferenceConfig
from scalerun.cli.output_file import prepare_output_files, refuse_inputs
from scalerun.criterions.base_criterion import build_criterion
from scalerun.data.length_batches import BatchLimits
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.ranges import above_zero, at_least, check_num_workers
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.launch import choose_device
from scalerun.distributed.stop_signal import StopSignal
from scalerun.evaluation import SubsetResult, evaluate
from scalerun.logging.console import setup_logging


@dataclass
class ValidateConfig(InferenceConfig):
    """What ``scalerun.cli.validate`` can be told."""

    data: str | None = option(None, "data folder (default: the run's own)", positional=True)
    valid_subset: list[str] = option(
        ["valid"], "folders below DATA to score; a folder of sets stands for all of them"
    )
    batch_size: int | None = option(
        None, "sequences in a batch (default: as in training)", aliases=("--max-sentences",)
    )
    max_tokens: int | None = option(
        None, "tokens in a batch of sequences of similar length (default: as in training)"
    )
    max_valid_steps: int | None = option(None, "score at most this many batches of each set")
    context_window: int = option(
        0, "tokens of context that every target has at least, but those at the start of a text"
    )
    num_workers: int = option(0, "processes that prepare batches")
    json: str | None = option(None, "also write the numbers to this file")
    output_word_probs: str | None = option(
        None, "file for the log-probability of each word, as JSON lines"
    )
    output_word_stats: str | None = option(
        None, "file for the mean log-probabilities of each different word, as JSON lines"
    )

    def validate(self) -> None:
        super().validate()
        if not self.valid_subset:
            raise ConfigError("--valid-subset is empty; name a set to score")
        above_zero("--batch-size", self.batch_size)
        above_zero("--max-tokens", self.max_tokens)
        above_zero("--max-valid-steps", self.max_valid_steps)
        at_least("--context-window", self.context_window, 0)
        check_num_workers(self.num_workers)

    def outputs(self) -> dict[str, str | None]:
        """Files to write, by their flags."""
        return {
            "--json": self.json,
            "--output-word-probs": self.output_word_probs,
            "--output-word-stats": self.output_word_stats,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Score every set, print a table, write ``--json``; return the exit code."""
    cfg = parse_config(ValidateConfig, argv, prog="scalerun-validate")
    setup_logging()
    prepare_output_files(cfg.outputs(), inputs=[cfg.data])
    with StopSignal():
        results = score(cfg)
    print(format_table(results))
    if cfg.json is not None:
        write_json(Path(cfg.json), results)
    return 0


def score(cfg: ValidateConfig) -> list[SubsetResult]:
    """Score every set with the settings that training used, unless told otherwise."""
    # Only now, so that --help need not wait for torch's distributed packages.
    from scalerun.cli.inference import load_for_inference
    from scalerun.cli.word_scores import WordFiles, WordRecorder

    device = choose_device(cpu=cfg.cpu)
    run = load_for_inference(
        cfg.path, device=device, use_ema=cfg.use_ema, data=cfg.data, user_dir=cfg.user_dir
    )
    refuse_inputs(cfg.outputs(), [getattr(run.task.cfg, "data", None)])
    precision = cfg.precision(run.cfg.common, device)
    if cfg.context_window:
        run.task.use_context_window(cfg.context_window)
    dataset = run.cfg.dataset
    if cfg.batch_size is not None or cfg.max_tokens is not None:
        limits = BatchLimits(cfg.batch_size, cfg.max_tokens)
        run.task.set_batch_limits(train=limits, valid=limits)
    subsets = run.task.valid_subsets(cfg.valid_subset)
    if not subsets:
        raise UserError(
            f"{cfg.data or 'the data'} has no validation set; name a set in DATA with "
            "--valid-subset, or score the training text with --valid-subset train"
        )
    results = []
    with WordFiles(cfg.output_word_probs, cfg.output_word_stats) as files:
        for subset in subsets:
            recorder = WordRecorder(run, subset, files) if files.are_wanted else None
            result = evaluate(
                run.task,
                run.model,
                recorder or build_criterion(run.cfg.criterion).to(device),
                subset,
                batch_size=cfg.batch_size or dataset.batch_size_valid or dataset.batch_size or 1,
                precision=precision,
                max_steps=cfg.max_valid_steps,
                num_workers=cfg.num_workers,
            )
            assert result is not None
            words = recorder.finish() if recorder is not None else None
            results.append(replace(result, words=words))
    return results


def format_table(results: Sequence[SubsetResult]) -> str:
    """The numbers in aligned columns, for people."""
    found = [_columns(result) for result in results]
    names = list(dict.fromkeys(name for columns in found for name in columns))
    rows = [names, *([columns.get(name, "-") for name in names] for columns in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    )


def _columns(result: SubsetResult) -> dict[str, str]:
    """Each number of a set under its heading."""
    bits = result.bits_per_byte
    columns = {
        "subset": result.subset,
        "loss": f"{result.loss:.4f}",
        "ppl": f"{result.ppl:.2f}",
        "bits/byte": "-" if bits is None else f"{bits:.4f}",
        **{name: f"{value:.4f}" for name, value in result.scores.items()},
        "tokens": f"{result.tokens:,}",
        "documents": f"{result.documents:,}",
    }
    if result.words is not None:
        word_ppl = result.word_ppl
        columns["ppl/word"] = "-" if word_ppl is None else f"{word_ppl:.2f}"
        columns["words"] = f"{result.words:,}"
    return columns


def write_json(path: Path, results: Sequence[SubsetResult]) -> None:
    """Write ``{"<subset>": {"loss", "ppl", "bits_per_byte", "tokens", "documents"}}``.

    With scores of words also ``word_ppl`` and ``words``.
    """
    content = {}
    for result in results:
        numbers = result.record()
        subset = numbers.pop("subset")
        content[subset] = {**numbers, "documents": result.documents}
        if result.words is not None:
            content[subset] |= {"word_ppl": result.word_ppl, "words": result.words}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from error


def cli_main() -> None:
    """Entry point of ``scalerun-validate``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
