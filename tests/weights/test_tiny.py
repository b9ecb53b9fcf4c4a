"""The small model has everything that the released one has, and numbers that a forward pass survives."""

import hashlib

import pytest
import torch

from openv41.config import Config
from openv41.errors import CheckpointError
from openv41.formats import unpack_weight
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.weights.load import Checkpoint
from openv41.weights.names import published_tensors
from openv41.weights.tiny import FIRST, LAST, SPECIAL, RandomWeights, train_tokenizer, write_tiny


@pytest.fixture(scope="module")
def checkpoint(tiny) -> Checkpoint:
    return Checkpoint.open(tiny)


def digests(folder) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_seed_is_a_model(tiny, tmp_path):
    assert write_tiny(tmp_path / "same", seed=0) == Checkpoint.open(tiny).config
    assert digests(tmp_path / "same") == digests(tiny)


def test_an_existing_model_is_kept(tiny):
    before = digests(tiny)
    with pytest.raises(CheckpointError, match="not empty"):
        write_tiny(tiny, seed=1)
    assert digests(tiny) == before


def test_every_kind_of_tensor_is_there(checkpoint):
    """Names of the release with the numbers taken out: all of them occur here."""

    def kinds(config):
        return {
            ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in published_tensors(config)
        }

    assert kinds(checkpoint.config) == kinds(Config.released())


def test_vocabulary(tiny, checkpoint):
    tokenizer = Tokenizer.open(tiny)
    config = checkpoint.config
    assert tokenizer.vocab_size == config.vocab_size == 1024
    assert tokenizer.special == SPECIAL
    assert tuple(tokenizer.token(id) for id in range(3)) == FIRST
    assert tuple(tokenizer.token(id) for id in range(1024 - len(LAST), 1024)) == LAST
    assert tokenizer.token(config.image_token_id) == "<｜deepseek_image｜>"
    assert tokenizer.token(config.dspark_noise_token_id) == "<｜System｜>"
    assert compress_vocabulary(tokenizer, 1024, config.engram_compressed_vocab_size).max() < 1000
    words = tokenizer.encode("The lighthouse had not been lit for twenty years.", bos=False)
    assert len(words) < 20  # pieces of words, not the 49 bytes


def test_the_vocabulary_is_always_the_same():
    assert train_tokenizer(1024).to_str() == train_tokenizer(1024).to_str()


def test_sizes(checkpoint):
    """Every matrix roughly keeps the size of what it is applied to; nothing is infinite or not a number."""
    for name, spec in checkpoint.specs.items():
        scale = name.removesuffix("weight") + "scale"
        if name.endswith(".scale") or (".experts." in name and ".experts.1." not in name):
            continue  # one expert of each layer stands for the others
        stored = checkpoint.tensor(name)
        values = unpack_weight(stored, checkpoint.tensor(scale)) if scale in checkpoint.specs else stored.float()
        assert values.isfinite().all(), name
        if len(spec.shape) == 2 and "embed" not in name and spec.shape[0] > 4:
            gain = values.square().sum(1).mean().sqrt()
            assert 0.6 < gain < 1.5, (name, gain)  # the small ones have few blocks to average over


def test_the_whole_range_of_a_format_is_used(checkpoint):
    codes = checkpoint.tensor("layers.5.attn.wq_b.weight").view(torch.uint8) & 127
    assert codes.max() >= 0x78  # 256 and above, the highest exponent
    assert ((codes > 0) & (codes < 8)).any()  # below the smallest normal number
    assert len(checkpoint.tensor("layers.5.attn.wq_b.scale").view(torch.uint8).unique()) >= 3
    packed = checkpoint.tensor("layers.5.ffn.experts.3.w1.weight").view(torch.uint8)
    assert len(torch.cat([packed & 15, packed >> 4]).unique()) == 16
    scales = checkpoint.tensor("layers.5.ffn.experts.3.w1.scale").view(torch.uint8)
    assert scales.min() < 16 < scales.max()  # a row's block of zeros has the smallest scale there is


def test_a_tensor_depends_on_its_name_and_the_seed_alone():
    config = Config.tiny()
    one, other = RandomWeights(config, 0), RandomWeights(config.replace(vision_n_layers=0), 0)
    specs = published_tensors(config)
    for name in ("layers.2.attn.wkv.scale", "norm.weight"):
        assert torch.equal(one(name, specs[name]).view(torch.uint8), other(name, specs[name]).view(torch.uint8))
    assert not torch.equal(
        one("norm.weight", specs["norm.weight"]), RandomWeights(config, 1)("norm.weight", specs["norm.weight"])
    )
