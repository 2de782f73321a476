"""Translate with a checkpoint and score it: ``python -m scalerun.cli.generate --path RUN``."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from scalerun.cli.entry import run_cli
from scalerun.cli.output_file import prepare_output_files, refuse_inputs
from scalerun.cli.segments import Segments, read_segments
from scalerun.cli.shared_inference import SharedInferenceConfig
from scalerun.data.length_batches import BatchLimits, LengthBatches
from scalerun.data.tokenizers.joined_pieces import POST_PROCESSES, join_pieces
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.parser import parse_config
from scalerun.dataclass.ranges import above_zero, at_least
from scalerun.dataclass.scalerun_dataclass import option
from scalerun.distributed.launch import choose_device
from scalerun.distributed.ranks import Ranks
from scalerun.generation.continuation import Generation
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.logging.console import setup_logging
from scalerun.logging.translation_scores import (
    TOKENIZERS,
    TranslationScores,
    require_sacrebleu,
    score_translations,
)
from scalerun.models.encoder_decoder import EncoderDecoder
from scalerun.tasks.translation import TranslationTask
from scalerun.tasks.translator import SearchSettings, Translator

DEFAULT_SUBSET = "test"
DEFAULT_BATCH_SIZE = 64
SECONDS_BETWEEN_REPORTS = 10.0

logger = logging.getLogger(__name__)


@dataclass
class GenerateConfig(SharedInferenceConfig):
    """What ``scalerun.cli.generate`` can be told."""

    data: str | None = option(None, "data folder (default: the run's own)", positional=True)
    gen_subset: str | None = option(
        None, f"set of DATA to translate, such as valid (default: {DEFAULT_SUBSET})"
    )
    input: str | None = option(
        None, "translate the lines of this file instead, or of standard input (-)"
    )
    reference: str | None = option(None, "file with a reference for each line of --input")
    output: str | None = option(
        None, "write the translations here, a line for each source (default: standard output)"
    )
    json: str | None = option(
        None, "also write one JSON object for each hypothesis to this file, with its score"
    )
    scores: str | None = option(None, "also write BLEU and chrF to this file, as JSON")
    beam: int = option(5, "hypotheses of a sentence; 1 takes the likeliest token each time")
    lenpen: float = option(
        1.0, "score = log-probability / length ** lenpen: larger prefers longer translations"
    )
    diverse_beam_groups: int = option(
        1, "groups of hypotheses, each kept from the words that earlier ones chose; divides --beam"
    )
    diverse_beam_strength: float = option(
        0.5, "nats that a token costs for each hypothesis of earlier groups that chose it"
    )
    prefix_size: int = option(
        0, "first tokens of the reference that every hypothesis has to begin with"
    )
    nbest: int = option(1, "hypotheses of each source to write to --json, the best first")
    max_len_a: float = option(0.0, "longest translation: tokens for each token of its source, and")
    max_len_b: int = option(200, "this many tokens more")
    min_len: int = option(1, "tokens of a translation at least, its end not counted")
    batch_size: int | None = option(
        None,
        f"sources translated side by side (default: {DEFAULT_BATCH_SIZE}, no limit with "
        "--max-tokens)",
        aliases=("--max-sentences",),
    )
    max_tokens: int | None = option(
        None, "tokens of sources translated side by side, padding included"
    )
    post_process: str | None = option(
        None,
        "join the pieces of subword_nmt (ending in @@) or sentencepiece in all texts, where the "
        "vocabulary lists them as words",
        choices=POST_PROCESSES,
    )
    bleu_tokenize: str = option(
        "13a", "how sacreBLEU cuts texts into words; zh for Chinese", choices=TOKENIZERS
    )

    def validate(self) -> None:
        super().validate()
        self.search_settings().check()
        at_least("--nbest", self.nbest, 1)
        at_least("--prefix-size", self.prefix_size, 0)
        if self.nbest > self.beam:
            raise ConfigError(
                f"--nbest {self.nbest} is above --beam {self.beam}, and a search has no more "
                "hypotheses; raise --beam"
            )
        if self.nbest > 1 and self.json is None:
            raise ConfigError(
                f"--nbest {self.nbest} shows more than the best hypothesis in --json alone; add it"
            )
        if self.reference is not None and self.input is None:
            raise ConfigError("--reference belongs to --input; a set of DATA has its own")
        if self.gen_subset is not None and self.input is not None:
            raise ConfigError(
                f"--gen-subset {self.gen_subset} and --input {self.input} both say what to "
                "translate; remove one of them"
            )
        above_zero("--batch-size", self.batch_size)
        above_zero("--max-tokens", self.max_tokens)

    def outputs(self) -> dict[str, str | None]:
        """Files to write, by their flags."""
        return {"--output": self.output, "--json": self.json, "--scores": self.scores}

    def search_settings(self) -> SearchSettings:
        """How to search."""
        return SearchSettings(
            beam=self.beam,
            lenpen=self.lenpen,
            max_len_a=self.max_len_a,
            max_len_b=self.max_len_b,
            min_len=self.min_len,
            diverse_beam_groups=self.diverse_beam_groups,
            diverse_beam_strength=self.diverse_beam_strength,
        )

    def limits(self) -> BatchLimits:
        """How many sources are translated side by side."""
        if self.batch_size is None and self.max_tokens is None:
            return BatchLimits(DEFAULT_BATCH_SIZE)
        return BatchLimits(self.batch_size, self.max_tokens, multiple=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Translate, write what was asked for, print the scores; return the exit code."""
    cfg = parse_config(GenerateConfig, argv, prog="scalerun-generate")
    prepare_output_files(cfg.outputs(), inputs=[cfg.data, cfg.input, cfg.reference])
    return cfg.on_every_rank(lambda ranks: generate(cfg, ranks))


def generate(cfg: GenerateConfig, ranks: Ranks) -> int:
    """One rank's part: all search for the same translations, and rank 0 writes them."""
    setup_logging(rank=ranks.rank, world_size=ranks.size)
    device = choose_device(cpu=cfg.cpu, local_rank=ranks.local_rank)
    # Only now, so that --help need not wait for torch's distributed packages.
    from scalerun.cli.inference import load_for_inference

    run = load_for_inference(
        cfg.path,
        device=device,
        use_ema=cfg.use_ema,
        data=cfg.data,
        user_dir=cfg.user_dir,
        meshes=ranks.model_meshes,
    )
    if not isinstance(run.task, TranslationTask):
        raise UserError(
            f"--path: the run's task is {run.cfg.task._name}, which does not translate; continue "
            "prompts with scalerun.cli.interactive_cli"
        )
    refuse_inputs(cfg.outputs(), [run.task.cfg.data])
    task, subset = run.task, cfg.gen_subset or DEFAULT_SUBSET
    segments = ranks.control.on_main(lambda: read_segments(task, subset, cfg.input, cfg.reference))
    if segments.references is not None:
        require_sacrebleu("scoring translations")
    elif cfg.scores is not None or cfg.prefix_size:
        flag = "--prefix-size" if cfg.prefix_size else "--scores"
        raise UserError(f"{flag} needs references, and {segments.name} has none")
    assert isinstance(run.model, EncoderDecoder)
    translator = Translator(SequenceGenerator(run.model, run.task.tokenizer), cfg.search_settings())
    with cfg.precision(run.cfg.common, device).autocast():
        answers = translate(
            segments, run.task, translator, cfg.limits(), prefix_size=cfg.prefix_size
        )
    if not ranks.is_main:
        return 0
    segments, answers = joined(segments, answers, cfg.post_process)
    write_answers(cfg, segments, answers)
    if segments.references is not None:
        best = [plain(each) for each in answers]
        scores = score_translations(best, segments.references, tokenize=cfg.bleu_tokenize)
        report(cfg, scores, num_sentences=len(best))
    return 0


def translate(
    segments: Segments,
    task: TranslationTask,
    translator: Translator,
    limits: BatchLimits,
    *,
    prefix_size: int = 0,
) -> list[list[Generation]]:
    """The hypotheses of each source, the best first; none for a blank source.

    Args:
        prefix_size: tokens of the reference, its end not counted, that hypotheses begin with.

    Raises:
        UserError: a source is too long; names the line.
    """
    tokens = segments.source_tokens(task.source_tokenizer)
    lines = [line for line, each in enumerate(tokens) if each]
    _check_lengths(segments, {line: len(tokens[line]) for line in lines}, translator, limits)
    begun = segments.references if prefix_size and segments.references else [""] * len(tokens)
    prefixes = [task.tokenizer.encode(text)[:prefix_size] for text in begun]
    answers: list[list[Generation]] = [[] for _ in tokens]
    if not lines:
        return answers
    lengths_N1 = np.array([[len(tokens[line])] for line in lines])
    done, reported = 0, time.monotonic()
    for batch in LengthBatches(lengths_N1, limits):
        members = [lines[i] for i in batch.members]
        found = translator.translate(
            [tokens[line] for line in members], [prefixes[line] for line in members]
        )
        for line, hypotheses in zip(members, found, strict=True):
            answers[line] = hypotheses
        done += len(members)
        if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
            reported = time.monotonic()
            logger.info("%d of %d sources are translated", done, len(lines))
    return answers


def _check_lengths(
    segments: Segments, lengths: dict[int, int], translator: Translator, limits: BatchLimits
) -> None:
    for what, limit in (
        ("the model's source positions", translator.max_source_length()),
        ("--max-tokens", limits.max_tokens),
    ):
        for line, length in lengths.items():
            if limit is not None and length > limit:
                raise UserError(
                    f"{segments.name}, line {line + 1}: {length} tokens exceed {what}, {limit}; "
                    "shorten the line"
                )


def joined(
    segments: Segments, answers: Sequence[Sequence[Generation]], post_process: str | None
) -> tuple[Segments, list[list[Generation]]]:
    """The same with the pieces of words joined in all texts."""
    join = partial(join_pieces, post_process=post_process)
    texts = [[replace(each, text=join(each.text)) for each in those] for those in answers]
    references = None if segments.references is None else list(map(join, segments.references))
    sources = list(map(join, segments.sources))
    return replace(segments, sources=sources, references=references), texts


def plain(hypotheses: Sequence[Generation]) -> str:
    """The best hypothesis as one line."""
    return " ".join(hypotheses[0].text.splitlines()) if hypotheses else ""


def write_answers(
    cfg: GenerateConfig, segments: Segments, answers: Sequence[Sequence[Generation]]
) -> None:
    """Write the best hypotheses as lines, and all that are wanted as JSON."""
    lines = [plain(each) + "\n" for each in answers]
    if cfg.output is not None:
        _write("--output", cfg.output, lines)
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.writelines(lines)
    if cfg.json is not None:
        records = json_records(segments, answers, nbest=cfg.nbest)
        _write("--json", cfg.json, (json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def json_records(
    segments: Segments, answers: Sequence[Sequence[Generation]], *, nbest: int
) -> Iterator[dict[str, object]]:
    """A record for each hypothesis; those of a source follow each other, the best first."""
    for number, (source, hypotheses) in enumerate(
        zip(segments.sources, answers, strict=True), start=1
    ):
        reference = None if segments.references is None else segments.references[number - 1]
        for hypothesis in hypotheses[:nbest]:
            yield {
                "line": number,
                "source": source,
                "reference": reference,
                "hypothesis": hypothesis.text,
                "score": hypothesis.score,
                "tokens": hypothesis.tokens,
                "token_logprobs": hypothesis.token_logprobs,
                "finish_reason": hypothesis.finish_reason,
            }


def report(cfg: GenerateConfig, scores: TranslationScores, *, num_sentences: int) -> None:
    """Print the scores, away from translations that are printed, and write ``--scores``."""
    out = sys.stderr if cfg.output is None else sys.stdout
    print(f"{scores.bleu_details}\n  {scores.bleu_signature}", file=out)
    print(f"chrF2 = {scores.chrf:.2f}\n  {scores.chrf_signature}", file=out)
    if cfg.scores is not None:
        content = {**asdict(scores), "sentences": num_sentences}
        _write("--scores", cfg.scores, [json.dumps(content, indent=2) + "\n"])


def _write(flag: str, path: str, lines: Iterable[str]) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(lines)
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be written: {error.strerror}") from error


def cli_main() -> None:
    """Entry point of ``scalerun-generate``."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
