"""From settings to what a run is made of: configuration, vocabulary, model, texts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from openv41.config import Config
from openv41.errors import ConfigError, InputError
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.model.transformer import Transformer
from openv41.ops import Numerics, Ops, choose, trains_by_kernel
from openv41.train.data import Corpus, read_files
from openv41.train.settings import DataSettings, ModelSettings, Settings
from openv41.train.trainable import build
from openv41.weights.tiny import SPECIAL, train_tokenizer

BESIDE = ("tokenizer.json", "tokenizer_config.json")
"""Files of a vocabulary that go into every checkpoint."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and its files as they are written beside the weights."""

    tokenizer: Tokenizer
    files: dict[str, bytes]


def open_model(settings: Settings) -> tuple[Config, Vocabulary, Transformer]:
    """The configuration that checkpoints are written in, the vocabulary, and the float model on its device.

    Raises `ConfigError` for a configuration or vocabulary that does not fit, `CheckpointError` for weights to start
    from that do not.
    """
    chosen, device = settings.model, _device(settings.device)
    config = _config(chosen)
    vocabulary = _vocabulary(chosen, config)
    compressed = None if _is_tiny(chosen) else config.engram_compressed_vocab_size or None
    token_map = compress_vocabulary(vocabulary.tokenizer, config.vocab_size, compressed)
    if _is_tiny(chosen) and config.engram_layer_ids:
        config = config.replace(engram_compressed_vocab_size=int(token_map.max()) + 1)
    if settings.loss.draft and not config.n_mtp_layers:
        raise ConfigError(
            f"loss.draft must be 0 for a model without draft stages, got {settings.loss.draft}; leave it out"
        )
    if settings.data.context > config.context:
        raise ConfigError(
            f"data.context must be at most {config.context} (original_seq_len x rope_factor of the model), got "
            f"{settings.data.context}; lower it, or raise one of these in [model.replace]"
        )
    model = build(config, ops_of(settings, config, chosen.numerics), settings.seed, chosen.start or None)
    if model.lookback is not None:
        model.lookback.token_map.copy_(token_map)
    return config, vocabulary, model.to(device)


def ops_of(settings: Settings, config: Config, numerics: Numerics) -> Ops:
    """The one place where a run's arithmetic is chosen: float32 throughout, or the published rounding; and by which
    set, as `model.ops` says. Raises `OpsError` for a set that the device cannot run."""
    want = settings.model.ops
    shape = config.n_heads, config.head_dim, config.hc_mult, config.dim
    if want == "auto" and trains_by_kernel(settings.device, *shape):
        want = "hopper"
    dtype = torch.float32 if numerics == "plain" else None
    return choose(settings.device, want, numerics, training=True, dtype=dtype)


@contextmanager
def arithmetic(settings: Settings) -> Iterator[None]:
    """For as long as a run lasts: on a CPU sums in a fixed order, on a GPU products of float32 in TF32, if that is
    allowed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    precision, on_cpu = torch.get_float32_matmul_precision(), torch.device(settings.device).type == "cpu"
    # On a GPU some sums have no fixed order, and asking for one would be an error.
    torch.use_deterministic_algorithms(on_cpu)
    if not on_cpu:
        torch.set_float32_matmul_precision("high" if settings.model.tf32 else "highest")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_float32_matmul_precision(precision)


def open_texts(settings: DataSettings, tokenizer: Tokenizer, vocab_size: int) -> tuple[Corpus, Corpus]:
    """The documents for training and for validation. Raises `InputError` where one of them has none."""
    train = read_files(settings.train, tokenizer, vocab_size, settings.text_key)
    if settings.validation:
        held = read_files(settings.validation, tokenizer, vocab_size, settings.text_key)
    else:
        train, held = train.split(settings.validation_share)
    for corpus, key in ((train, "data.train"), (held, "data.validation")):
        if not corpus.targets:
            raise InputError(
                f"{key} has no text: give more documents than one, or name files for validation in data.validation"
            )
    return train, held


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {name!r}; correct it") from None
    count = torch.cuda.device_count()
    if device.type != "cpu" and (device.type != "cuda" or (device.index or 0) >= count):
        raise ConfigError(f"device must be one that torch sees, got {name!r} with {count} GPUs; use cpu")
    return device


def name_of(device: str) -> str:
    """What a device calls itself; a CPU is just "cpu"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def _is_tiny(chosen: ModelSettings) -> bool:
    return (chosen.tokenizer or chosen.base) == "tiny"


def _config(chosen: ModelSettings) -> Config:
    path = Path(chosen.base)
    config = (
        Config.tiny() if chosen.base == "tiny" else Config.from_json(path / "config.json" if path.is_dir() else path)
    )
    if unknown := [key for key in chosen.replace if key not in config.to_dict()]:
        raise ConfigError(
            f"model.replace.{unknown[0]} is no field of a configuration; the fields are those of config.json"
        )
    return config.replace(**chosen.replace) if chosen.replace else config


def _vocabulary(chosen: ModelSettings, config: Config) -> Vocabulary:
    """The small vocabulary is trained to as many ids as the configuration has."""
    if _is_tiny(chosen):
        backend = train_tokenizer(config.vocab_size)
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
        files = {BESIDE[0]: backend.to_str(pretty=True).encode(), BESIDE[1]: json.dumps(described, indent=2).encode()}
        return Vocabulary(Tokenizer(backend, SPECIAL), files)
    path = Path(chosen.tokenizer or chosen.base)
    folder = path if path.is_dir() else path.parent
    files = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}
    return Vocabulary(Tokenizer.open(folder), files)
