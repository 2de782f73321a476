import pytest

from scalerun.dataclass.errors import ConfigError
from scalerun.dataclass.scalerun_dataclass import ScalerunDataclass
from scalerun.models.beit3 import BEiT3Config
from scalerun.models.retnet import RetNetConfig
from scalerun.models.tensor_parallel import check_tensor_parallel
from scalerun.models.transformer_config import TransformerConfig
from scalerun.models.transformer_encoder import TransformerEncoderConfig

DECODER = TransformerConfig(decoder_attention_heads=4, decoder_ffn_embed_dim=24)


@pytest.mark.parametrize(
    ("cfg", "ranks", "message"),
    [
        (DECODER, 3, "--decoder-attention-heads 4 cannot be shared equally by --model-parallel-"),
        (RetNetConfig(decoder_retention_heads=4), 8, "--decoder-retention-heads 4 cannot be"),
        (
            TransformerEncoderConfig(encoder_attention_heads=4),
            3,
            "--encoder-attention-heads 4 cannot be shared",
        ),
        (
            TransformerConfig(decoder_attention_heads=4, decoder_ffn_embed_dim=25),
            2,
            "--decoder-ffn-embed-dim 25 cannot be shared",
        ),
        (
            BEiT3Config(),
            2,
            "--sequence-parallel spreads a sequence over the ranks, and with --multiway",
        ),
    ],
)
def test_what_the_ranks_cannot_share_is_refused(cfg, ranks, message):
    with pytest.raises(ConfigError, match=message):
        check_tensor_parallel(cfg, ranks=ranks, sequence_parallel=True)
    check_tensor_parallel(cfg, ranks=1, sequence_parallel=False)


def test_a_vocabulary_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="the 265 symbols of the vocabulary cannot be shared"):
        check_tensor_parallel(DECODER, ranks=2, sequence_parallel=False, vocab_size=265)
    check_tensor_parallel(DECODER, ranks=2, sequence_parallel=True, vocab_size=264)


def test_multiway_layers_are_shared_where_tokens_are_not_spread():
    check_tensor_parallel(BEiT3Config(), ranks=2, sequence_parallel=False)


def test_a_model_without_stacks_is_whole_on_every_rank():
    check_tensor_parallel(ScalerunDataclass(), ranks=3, sequence_parallel=True, vocab_size=265)
