"""What a run reports: averages, speed, records and where they go, profiles, non-finite values."""

from scalerun.logging.base_sink import BaseSink
from scalerun.logging.console import close_logging, setup_logging
from scalerun.logging.metrics import Metrics, bits_per_byte, perplexity
from scalerun.logging.nan_detector import NanDetector
from scalerun.logging.profiler import UpdateProfiler
from scalerun.logging.records import Record, encode_record, read_records
from scalerun.logging.sinks import METRICS_FILE, SinkGroup, build_sinks
from scalerun.logging.throughput import Throughput, measure_matmul_rate, peak_memory

__all__ = [
    "METRICS_FILE",
    "BaseSink",
    "Metrics",
    "NanDetector",
    "Record",
    "SinkGroup",
    "Throughput",
    "UpdateProfiler",
    "bits_per_byte",
    "build_sinks",
    "close_logging",
    "encode_record",
    "measure_matmul_rate",
    "peak_memory",
    "perplexity",
    "read_records",
    "setup_logging",
]
