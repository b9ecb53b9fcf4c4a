"""A small model in the form of the release: every part and every role, random weights, a vocabulary of its own.

It says nothing sensible. It is for tests, demonstrations and for trying things out on a laptop, where it goes through
the same code as the released model: names, shards, formats, token map, chat markers.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from openv41.config import QUANT_BLOCK, Config, SpecialIds
from openv41.formats import WINDOW, pack_fp4_weight, pack_fp8_weight
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.weights.names import Spec, published_tensors
from openv41.weights.tiny_text import TEXT
from openv41.weights.write import write_checkpoint

SPECIAL = SpecialIds(bos=0, eos=1, pad=2)
FIRST = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
LAST = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜System｜>",  # its id also marks the places that a draft fills, as in the release
    "<｜deepseek_image｜>",
)
"""The published spellings of the markers that this vocabulary begins and ends with."""


def write_tiny(folder: str | Path, seed: int = 0, overwrite: bool = False) -> Config:
    """Writes the small model to `folder` and returns its configuration.

    `seed` (0 or more) chooses the weights; the vocabulary is always the same. With the same versions of numpy,
    tokenizers and torch, a seed gives the same bytes everywhere. Raises `CheckpointError` like `write_checkpoint`.
    """
    backend = train_tokenizer(Config.tiny().vocab_size)
    token_map = compress_vocabulary(Tokenizer(backend, SPECIAL), Config.tiny().vocab_size)
    config = Config.tiny(compressed_vocab=int(token_map.max()) + 1)
    files = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(_tokenizer_config(config), indent=2, ensure_ascii=False).encode(),
    }
    write_checkpoint(folder, config, SPECIAL, RandomWeights(config, seed), files, overwrite)
    return config


# Vocabulary


def train_tokenizer(vocab_size: int, texts: Iterable[str] = tuple(TEXT.splitlines(keepends=True))) -> Backend:
    """A byte-level BPE of exactly `vocab_size` ids, with the markers `FIRST` and `LAST` at its ends."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(LAST),
        min_frequency=1,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in FIRST],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in LAST])
    assert backend.get_vocab_size() == vocab_size, f"the text yields only {backend.get_vocab_size()} ids"
    return backend


def _tokenizer_config(config: Config) -> dict[str, object]:
    begin, end, _ = FIRST
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.context,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
    }


# Weights


class RandomWeights:
    """Seeded random tensors by published name, of a size that keeps activations near 1 through all layers.

    A tensor depends on the seed and its name alone. Quantised weights use the whole range of their format: values far
    below the scale, scales that differ from block to block, and now and then a block of zeros.
    """

    def __init__(self, config: Config, seed: int) -> None:
        self.specs: Mapping[str, Spec] = published_tensors(config)
        self.streams = config.hc_mult
        self.seed = seed

    def __call__(self, name: str, spec: Spec) -> Tensor:
        weight = name.removesuffix("scale") + "weight" if name.endswith(".scale") else name
        scale = weight.removesuffix("weight") + "scale"
        if scale not in self.specs:
            return self._plain(name, spec)
        packed = self._packed(weight, self.specs[weight], self.specs[scale].shape)
        return packed[weight != name]

    def _packed(self, name: str, spec: Spec, blocks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The stored weight and its scales; there are `blocks` scales."""
        rng = self._rng(name)
        rows, columns = spec.shape
        if spec.dtype == "I8":
            columns *= 2
        by_row = blocks[0] == rows
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        values[rng.random((rows, columns)) < 1 / 32] *= 2.0**-14
        gains = rng.choice(np.array([0, 0.5, 1, 2], np.float32), size=blocks, p=[0.01, 0.33, 0.33, 0.33])
        for axis in (1,) if by_row else (0, 1):
            gains = gains.repeat(QUANT_BLOCK, axis)
        # The gains' mean square is about 1.75. A table's rows are looked up, so they are of size 1 themselves.
        size = 1.0 if name.endswith(".embed.weight") else columns**-0.5
        scaled = torch.from_numpy(values * gains[:rows, :columns] * np.float32(size * 1.75**-0.5))
        if spec.dtype == "I8":
            codes, scales = pack_fp4_weight(scaled)
            return codes.view(torch.int8), scales
        return WINDOW.pack(scaled) if by_row else pack_fp8_weight(scaled)  # a table's rows are packed like the window's

    def _plain(self, name: str, spec: Spec) -> Tensor:
        noise = self._rng(name).standard_normal(spec.shape, dtype=np.float32)
        values = torch.from_numpy(self._shaped(name, noise))
        return values.to(torch.bfloat16) if spec.dtype == "BF16" else values

    def _shaped(self, name: str, noise: np.ndarray) -> np.ndarray:
        """Standard normal noise, turned into what a tensor of this name would hold."""
        if name.endswith("_base"):  # mixes: sublayers read and write all streams, which mostly keep to themselves
            keep = np.zeros(noise.shape, np.float32)
            keep[2 * self.streams :] = np.eye(self.streams, dtype=np.float32).flatten()
            return keep + np.float32(0.3) * noise
        if name.endswith("_scale"):
            return np.float32(0.5) + np.float32(0.1) * noise
        if name.endswith((".bias", ".bias_vl")):
            return np.float32(0.05) * noise
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".q_weight", ".k_weight")):
            return np.float32(1) + np.float32(0.1) * noise
        if noise.ndim == 1 or name.endswith("embed.weight"):  # sinks, image delimiters, embeddings
            return noise
        return noise * np.float32(noise.shape[-1] ** -0.5)

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])
