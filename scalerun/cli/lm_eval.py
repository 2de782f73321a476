"""The lm-evaluation-harness on a checkpoint: ``python -m scalerun.cli.lm_eval --model scalerun …``.

The command line is the harness's own; here it gets one more type of model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalerun.cli.entry import run_cli
from scalerun.cli.inference_config import InferenceConfig
from scalerun.dataclass.errors import ConfigError, UserError
from scalerun.dataclass.sampling_params import SamplingParams
from scalerun.distributed.launch import choose_device
from scalerun.generation.scoring import TokenScorer
from scalerun.generation.sequence_generator import SequenceGenerator
from scalerun.models.base_decoder import BaseDecoder

if TYPE_CHECKING:
    from scalerun.cli.inference import LoadedRun

try:
    from lm_eval import __main__ as harness_command
    from lm_eval.api import registry as harness_registry
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    harness_command, TemplateLM = None, object

NAME = "scalerun"
INSTALL = "pip install lm_eval"
MAX_NEW_TOKENS = 256
"""The harness's own limit, where a task names none."""
KNOWN_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}


class HarnessModel(TemplateLM):
    """What the harness asks of a model, answered by a checkpoint.

    A text begins as in training: with the end symbol. Of a text that is longer than the context the
    end is read.

    Args:
        path: a run folder or a checkpoint folder.
        batch_size: texts at a time.
        max_batch_size: given by the harness; not used.
        device: ``cpu``; by default a GPU where there is one.
        max_length: tokens of the context, at most; by default the model's positions, or where they
            have no end the length of the training sequences.
        use_ema: take the averaged weights.
        user_dir: folder with plug-in code.

    Raises:
        UserError: the checkpoint cannot be used.
    """

    def __init__(
        self,
        path: str,
        *,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        use_ema: bool = False,
        user_dir: str | None = None,
    ) -> None:
        super().__init__()
        # Only now, so that --help need not wait for torch's distributed packages.
        from scalerun.cli.inference import load_for_inference

        self._device = choose_device(cpu=device == "cpu")
        run = load_for_inference(str(path), device=self._device, use_ema=use_ema, user_dir=user_dir)
        model, tokenizer = run.model, run.task.tokenizer
        if not isinstance(model, BaseDecoder) or tokenizer is None:
            raise UserError(
                f"{path} does not predict the next token of a text; give another --path"
            )
        self.run = run
        self.vocabulary = tokenizer
        self.batch_size = _whole_number("--batch_size", batch_size)
        self.max_length = context_length(run, model, max_length)
        self.generator = SequenceGenerator(model, tokenizer)
        self.scorer = TokenScorer(
            model,
            pad_id=tokenizer.dictionary.pad,
            precision=InferenceConfig(path=str(path)).precision(run.cfg.common, self._device),
            batch_size=self.batch_size,
        )

    @property
    def eot_token_id(self) -> int:
        """The end symbol, which is also what a text begins with."""
        return self.vocabulary.dictionary.eos

    @property
    def tokenizer_name(self) -> str:
        """Belongs to the keys of the harness's caches."""
        return self.vocabulary.digest

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Tokens of a text, without special symbols whatever is asked for."""
        return self.vocabulary.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self.fit(context, continuation) for _, context, continuation in requests]
        answers = [(sum(s.logprobs), s.is_greedy) for s in self.scorer.score(pairs)]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The end symbol, as much of the end of the context as there is room for; what to score.

        Raises:
            UserError: the continuation alone is longer than the context of the model.
        """
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens does not fit into the model's "
                f"context of {self.max_length}; the task needs a model with a longer one"
            )
        if context[:1] != [self.eot_token_id]:
            context = [self.eot_token_id, *context]
        # The last token is predicted, and never read.
        room = self.max_length - len(continuation) + 1
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], **kwargs: Any) -> list[float]:
        """Log-likelihood of whole texts in windows of the context, each token once."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            mine = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            mine = [make_disjoint_window(window) for window in mine]
            windows += mine
            counts.append(len(mine))
        scores = iter(self.scorer.score(windows))
        totals = [sum(sum(next(scores).logprobs) for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], **kwargs: Any) -> list[str]:
        """Continue each prompt, greedily unless the task asks to draw."""
        texts: list[str] = []
        for start in range(0, len(requests), self.batch_size):
            mine = requests[start : start + self.batch_size]
            params = [self.sampling_params(request.args[1]) for request in mine]
            prompts = [
                self.tok_encode(request.args[0])[-(self.max_length - each.max_new_tokens) :]
                for request, each in zip(mine, params, strict=True)
            ]
            with self.scorer.precision.autocast():
                answers = self.generator.generate(prompts, params)
            texts += [answer.text for answer in answers]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def sampling_params(self, gen_kwargs: dict[str, Any]) -> SamplingParams:
        """How a task wants its answers.

        Raises:
            ConfigError: it asks for what there is not, or leaves a prompt no room.
        """
        settings = normalize_gen_kwargs(gen_kwargs, MAX_NEW_TOKENS)
        unknown = sorted(settings.keys() - KNOWN_SETTINGS)
        if unknown:
            raise ConfigError(
                f"the task's generation_kwargs have {', '.join(unknown)}, which --model {NAME} "
                f"does not know; it knows {', '.join(sorted(KNOWN_SETTINGS))}"
            )
        if settings["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f"max_gen_toks {settings['max_gen_toks']} leaves a prompt no room in the model's "
                f"context of {self.max_length}; give --gen_kwargs max_gen_toks=N with a smaller N"
            )
        draws = settings["do_sample"]
        return SamplingParams(
            max_new_tokens=settings["max_gen_toks"],
            temperature=float(settings.get("temperature", 1.0)) if draws else 0.0,
            top_k=int(settings.get("top_k", 0)) if draws else 0,
            top_p=float(settings.get("top_p", 1.0)) if draws else 1.0,
            stop=tuple(text for text in settings["until"] if text),
        )


def context_length(run: LoadedRun, model: BaseDecoder, wanted: int | None) -> int:
    """Tokens that the model reads at most."""
    positions = model.max_positions()
    length = _whole_number("max_length", wanted or positions or run.task.sequence_length)
    if positions is not None and length > positions:
        raise ConfigError(
            f"max_length {length} is above the model's {positions} positions; lower it"
        )
    return length


def _whole_number(name: str, value: int | str) -> int:
    if not str(value).isdigit() or int(value) < 1:
        raise ConfigError(f"{name} is {value}; give a whole number from 1")
    return int(value)


def main() -> int:
    """Run the harness with the arguments of the command line; return the exit code."""
    if harness_command is None:
        raise ConfigError(f"scalerun.cli.lm_eval needs the package lm_eval: {INSTALL}")
    harness_registry.register_model(NAME)(HarnessModel)
    harness_command.cli_evaluate()
    return 0


def cli_main() -> None:
    """The command."""
    run_cli(main)


if __name__ == "__main__":
    cli_main()
