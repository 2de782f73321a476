"""Text files to batches: layouts, tokenizers, the token cache, packing, order, loading."""

from scalerun.data.base_dataset import BaseDataset, DatasetCounts
from scalerun.data.batch import IGNORE_INDEX, Batch
from scalerun.data.loader import BatchLoader, valid_batches
from scalerun.data.tokenizers.base_tokenizer import BaseTokenizer, StreamDecoder
from scalerun.data.tokenizers.dictionary import Dictionary
from scalerun.data.tokenizers.tokenizer import load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "BaseDataset",
    "BaseTokenizer",
    "Batch",
    "BatchLoader",
    "DatasetCounts",
    "Dictionary",
    "StreamDecoder",
    "load_tokenizer",
    "valid_batches",
]
