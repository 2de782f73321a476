"""A translation model of transformers' Marian, trained from nothing: the peer of a recipe.

Reads ``FOLDER/{train,valid,test}.{SOURCE,TARGET}`` and a sentencepiece model of both languages,
trains for a given CPU time, translates the test set by beam search, and prints sacreBLEU. It needs
the packages transformers, sentencepiece and sacrebleu. Size, dropout, batches and beam are the
recipe's; the learning rate is its own.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import sacrebleu
import torch
import torch.nn.functional as F
from sentencepiece import SentencePieceProcessor
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

Pair = tuple[list[int], list[int]]
IGNORE = -100


def read_pairs(
    folder: Path, split: str, languages: list[str], pieces: SentencePieceProcessor
) -> list[Pair]:
    """Numbers of the pieces of source and target, each with the end of the sentence."""
    sides = [
        (folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
        for language in languages
    ]
    return [
        ([*pieces.encode(source), pieces.eos_id()], [*pieces.encode(target), pieces.eos_id()])
        for source, target in zip(*sides, strict=True)
    ]


def batches(pairs: list[Pair], max_tokens: int, draw: random.Random) -> Iterator[list[Pair]]:
    """Each pair once, with others of its length, at most ``max_tokens`` on either side."""
    order = sorted(pairs, key=lambda pair: (len(pair[1]), len(pair[0]), draw.random()))
    made: list[list[Pair]] = [[]]
    for pair in order:
        batch = [*made[-1], pair]
        longest = max(max(len(source), len(target)) for source, target in batch)
        if longest * len(batch) <= max_tokens:
            made[-1] = batch
        else:
            made.append([pair])
    draw.shuffle(made)
    yield from made


def padded(rows: list[list[int]], filler: int) -> Tensor:
    """(B, T) int64."""
    width = max(map(len, rows))
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])


def build(
    vocab_size: int, pieces: SentencePieceProcessor, args: argparse.Namespace
) -> MarianMTModel:
    """Embeddings of both sides and the output tied, sinusoidal positions."""
    pad = vocab_size - 1
    return MarianMTModel(
        MarianConfig(
            vocab_size=vocab_size,
            d_model=args.dim,
            encoder_layers=args.layers,
            decoder_layers=args.layers,
            encoder_attention_heads=args.heads,
            decoder_attention_heads=args.heads,
            encoder_ffn_dim=args.ffn,
            decoder_ffn_dim=args.ffn,
            dropout=args.dropout,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=256,
            pad_token_id=pad,
            eos_token_id=pieces.eos_id(),
            decoder_start_token_id=pieces.eos_id(),
            forced_eos_token_id=None,
        )
    )


def train(model: MarianMTModel, pairs: list[Pair], args: argparse.Namespace) -> int:
    """Train until the CPU time is over; the number of updates."""
    pad = model.config.pad_token_id
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1.0,
        betas=(0.9, 0.98),
        eps=1e-8,
        weight_decay=args.weight_decay,
        fused=True,
    )
    draw = random.Random(args.seed)
    updates, started = 0, time.process_time()
    model.train()
    while True:
        for batch in batches(pairs, args.max_tokens, draw):
            left = 1.0 - (time.process_time() - started) / (60 * args.cpu_minutes)
            if left <= 0.0:
                return updates
            updates += 1
            # A straight line that is at 0 when the time is over.
            rate = args.lr * min(updates / args.warmup_updates, left)
            for group in optimizer.param_groups:
                group["lr"] = rate
            source = padded([row for row, _ in batch], pad)
            target = padded([row for _, row in batch], IGNORE)
            begun = padded([[model.config.eos_token_id, *row[:-1]] for _, row in batch], pad)
            logits = model(
                input_ids=source, attention_mask=(source != pad).long(), decoder_input_ids=begun
            ).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                target.flatten(),
                ignore_index=IGNORE,
                label_smoothing=args.label_smoothing,
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if updates % 100 == 0:
                print(f"update {updates}, loss {loss.item():.3f}, lr {rate:.3g}", flush=True)


@torch.inference_mode()
def translate(
    model: MarianMTModel,
    pairs: list[Pair],
    pieces: SentencePieceProcessor,
    args: argparse.Namespace,
) -> list[str]:
    """The best of a beam search for each source, in order."""
    pad = model.config.pad_token_id
    model.eval()
    texts: dict[int, str] = {}
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i][0]))
    for first in range(0, len(order), 32):
        chosen = order[first : first + 32]
        source = padded([pairs[i][0] for i in chosen], pad)
        found = model.generate(
            input_ids=source,
            attention_mask=(source != pad).long(),
            num_beams=args.beam,
            length_penalty=args.lenpen,
            max_new_tokens=200,
        )
        for i, row in zip(chosen, found.tolist(), strict=True):
            texts[i] = pieces.decode([token for token in row if token < pieces.vocab_size()])
    return [texts[i] for i in range(len(pairs))]


def main() -> None:
    """Train, translate, score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True, help="sentencepiece model of both languages")
    parser.add_argument("--source-lang", default="en")
    parser.add_argument("--target-lang", default="es")
    parser.add_argument("--cpu-minutes", type=float, default=20.0)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--ffn", type=int, default=768)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup-updates", type=int, default=400)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--lenpen", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    pieces = SentencePieceProcessor(model_file=args.tokenizer)
    languages = [args.source_lang, args.target_lang]
    # One number more, for the padding.
    model = build(pieces.vocab_size() + 1, pieces, args)
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(f"{count:,} parameters that are trained")
    started = time.perf_counter()
    updates = train(model, read_pairs(args.folder, "train", languages, pieces), args)
    print(
        f"{updates} updates in {args.cpu_minutes:g} CPU minutes, "
        f"{time.perf_counter() - started:.0f} s"
    )
    for split in ("valid", "test"):
        pairs = read_pairs(args.folder, split, languages, pieces)
        reference = (args.folder / f"{split}.{args.target_lang}").read_text(encoding="utf-8")
        metric = sacrebleu.BLEU()
        score = metric.corpus_score(translate(model, pairs, pieces, args), [reference.splitlines()])
        print(f"{split}: {score.score:.2f} {metric.get_signature()}", flush=True)


if __name__ == "__main__":
    main()
