"""What a training run is: one frozen dataclass, read from a TOML file, every key checked.

    folder = "run"                      # metrics, checkpoints and the curve; the file's own folder is where paths begin
    steps = 300

    [model]
    base = "tiny"                       # or a config.json, or a model folder
    [data]
    train = ["texts/*.txt"]
    [optimizer]
    rate = 2e-3

All that is not given has the value below. A complaint says the key, its value, the rule and the way out.
"""

import difflib
import math
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from openv41.errors import ConfigError


def _rule(default: Any, least: Any = None, most: Any = None, above: Any = None) -> Any:
    """A field with a range: `least` and `most` may be reached, `above` may not."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


@dataclass(frozen=True)
class ModelSettings:
    """Which model: its shape, its vocabulary, and the weights that it starts from."""

    base: str = "tiny"
    """"tiny", or the path of a config.json or of a model folder."""
    tokenizer: str = ""
    """"tiny", or a folder with tokenizer.json and config.json; empty: the folder of `base`."""
    start: str = ""
    """A model folder whose weights the run starts from; empty: random ones."""
    numerics: Literal["plain", "published"] = "plain"
    """"plain" computes in float32; "published" rounds as the published model does, with straight-through gradients:
    for the end of a run, so that the numbers that are shipped are the ones that were trained."""
    published_from: float = _rule(1.0, 0, 1)
    """The share of the steps after which plain numerics become published ones; 1: never."""
    ops: Literal["auto", "fast", "hopper"] = "auto"
    """What computes: "hopper", kernels for GPUs of compute capability 9.0; "fast", the library's operations. "auto":
    the first where device and shapes allow it, else the second; on a CPU the set for CPUs."""
    tf32: bool = True
    """On a GPU: products of float32 with operands rounded to 10 bits behind the leading one, sums in float32."""
    recompute: bool = False
    """Keep only what enters each layer and run it again for the gradient: less memory, more time."""
    replace: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that are to differ from `base`."""


@dataclass(frozen=True)
class DataSettings:
    """Which texts, and how much of them makes a step."""

    train: tuple[str, ...] = ()
    """Files or patterns: .jsonl (a document a line), .bin (token ids, see `openv41.train.data`), any other one text."""
    validation: tuple[str, ...] = ()
    """The same for validation; empty: `validation_share` of the training documents, chosen by their hash."""
    validation_share: float = _rule(0.02, 0, 0.9)
    validation_tokens: int = _rule(16384, 1)
    """Tokens that a validation reads at most, always the same ones."""
    text_key: str = "text"
    """The field of a JSONL line that holds the text."""
    context: int = _rule(512, 2)
    """Tokens of one sequence at most; a longer document is cut into several."""
    tokens: int = _rule(1024, 2)
    """Tokens of one pack: what goes through the model, and back, together."""
    packs: int = _rule(1, 1)
    """Packs of one step: their gradients are added up."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Muon for matrices, AdamW for the rest, row-sparse Adam for n-gram tables."""

    rate: float = _rule(2e-3, above=0)
    """The highest learning rate. Muon's updates are scaled to the size of AdamW's, so that one rate serves both."""
    table_factor: float = _rule(5.0, 0)
    """The rate of n-gram tables, as a multiple."""
    warmup: int = _rule(20, 0)
    """Steps in which the rate rises from nothing."""
    final: float = _rule(0.1, 0, 1)
    """The rate at the last step, as a share of the highest; a cosine lies between."""
    cooldown: float = _rule(1.0, 0, 1)
    """The last share of the steps, in which the rate falls; between warm-up and them it stays the highest."""
    weight_decay: float = _rule(0.1, 0)
    """Of matrices and embeddings; not of norms, biases, sinks, n-gram tables."""
    momentum: float = _rule(0.95, 0, 0.9999)
    beta1: float = _rule(0.9, 0, 0.9999)
    beta2: float = _rule(0.95, 0, 0.99999)
    clip: float = _rule(1.0, above=0)
    """Greatest norm of all gradients together; longer ones are scaled down."""


@dataclass(frozen=True)
class LossSettings:
    """What is added to the language loss, and when a run counts as lost."""

    balance: float = _rule(1e-4, 0)
    """Weight of the sequence balance loss."""
    bias_rate: float = _rule(1e-3, 0)
    """How far the selection bias of an expert moves in a step."""
    index: float = _rule(1.0, 0)
    """Weight of the indexers' own loss; 0 leaves them as they are. It reaches nothing else."""
    index_every: int = _rule(1, 1)
    """Indexers learn in one step of so many: their loss compares all pairs of positions, the only one that does."""
    index_target: Literal["joint", "far_only"] = "joint"
    index_dense: int = _rule(0, 0)
    """Steps at the beginning in which indexers are held against all latents instead of those that they picked."""
    index_candidates: bool = True
    """Whether a re-scorer is held, in these steps, against its candidate blocks alone."""
    rows: int = _rule(2048, 1)
    """Rows whose logits are held at a time."""
    draft: float = _rule(0.0, 0)
    """Weight of the draft's loss; 0 leaves the draft as it is."""
    draft_from: float = _rule(0.0, 0, 1)
    """The share of the steps after which the draft learns; 0: from the beginning."""
    draft_blocks: int = _rule(128, 1)
    """Blocks that the draft is trained on, of each pack."""
    draft_only: bool = False
    """Train the draft alone, the model frozen."""
    explosion: float = _rule(3.0, above=0)
    """The run stops when the language loss exceeds the mean of the last 20 steps by more than this, in nats."""


@dataclass(frozen=True)
class RecordSettings:
    """How often the run looks at itself. These may change when a run is resumed."""

    validate_every: int = _rule(100, 0)
    """Steps between two validations; 0: only at the end."""
    recall_every: int = _rule(50, 0)
    """Steps between two lines that tell how many of the best latents each indexer picks; 0: never."""
    checkpoint_every: int = _rule(100, 1)
    keep: int = _rule(2, 1)
    """Checkpoints that are kept, the latest ones."""


@dataclass(frozen=True)
class Settings:
    """One training run."""

    folder: str = "run"
    """Where metrics, checkpoints and the curve go."""
    steps: int = _rule(300, 1)
    seed: int = _rule(0, 0, 2**31 - 1)
    device: str = "cpu"
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossSettings = LossSettings()
    record: RecordSettings = RecordSettings()

    @classmethod
    def from_toml(cls, path: str | Path) -> "Settings":
        """Read a file; paths in it begin at its folder. Raises `ConfigError`."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"no settings at {path}: give a TOML file, see docs/training.md") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as text: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is no TOML: {error}") from None
        try:
            return cls.from_dict(values, path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], home: Path | None = None) -> "Settings":
        """Build from a table with the tables of its sections in it. Relative paths begin at `home`."""
        settings = cls(**_checked(cls, values, ""))
        _check_whole(settings)
        return settings if home is None else _at_home(settings, home)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in sections."""
        return asdict(self)

    def differs_from(self, other: Mapping[str, Any]) -> list[str]:
        """The keys, in dotted form, whose values differ from `other` (of `to_dict`) and belong to what a run is."""
        here, there = _flat(self.to_dict()), _flat(other)
        keys = [key for key in here | there if key not in ("folder", "device") and not key.startswith("record.")]
        return [key for key in keys if here.get(key) != there.get(key)]


SECTIONS = {
    "ModelSettings": ModelSettings,
    "DataSettings": DataSettings,
    "OptimizerSettings": OptimizerSettings,
    "LossSettings": LossSettings,
    "RecordSettings": RecordSettings,
}
KINDS = {"int": "a whole number", "float": "a finite number", "str": "a text", "bool": "true or false"}


def _checked(kind: Any, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values of one section, each in its type and range, sections within it built."""
    known = {one.name: one for one in fields(kind)}
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"the keys here are {', '.join(known)}"
            raise ConfigError(f"{prefix}{key} is no key of these settings, got {reprlib.repr(values[key])}; {hint}")
    return {key: _value(f"{prefix}{key}", known[key], value) for key, value in values.items()}


def _value(key: str, one: Any, value: Any) -> Any:
    name = one.type if isinstance(one.type, str) else one.type.__name__
    if name in SECTIONS:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a section, got {reprlib.repr(value)}; write [{key}] with its keys below")
        return SECTIONS[name](**_checked(SECTIONS[name], value, f"{key}."))
    if name == "tuple":
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(type(text) is str for text in texts):
            raise ConfigError(f'{key} must be a list of texts, got {reprlib.repr(value)}; write ["a.txt", "b/*.txt"]')
        return tuple(texts)
    if name == "Mapping":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} must be a section, got {reprlib.repr(value)}; write [{key}] with its keys below")
        return dict(value)
    if get_origin(one.type) is Literal:
        if value not in get_args(one.type):
            raise ConfigError(
                f"{key} must be one of {', '.join(get_args(one.type))}, got {reprlib.repr(value)}; choose one"
            )
        return value
    if name == "float" and type(value) is int:
        value = float(value)
    if type(value).__name__ != name or (name == "float" and not math.isfinite(value)):
        raise ConfigError(f"{key} must be {KINDS[name]}, got {reprlib.repr(value)}; correct it or leave it out")
    least, most, above = (one.metadata.get(bound) for bound in ("least", "most", "above"))
    if (least is not None and value < least) or (above is not None and value <= above):
        rule = f"be at least {least}" if above is None else f"be above {above}"
        raise ConfigError(f"{key} must {rule}, got {value}; raise it, or leave it out for {one.default}")
    if most is not None and value > most:
        raise ConfigError(f"{key} must be at most {most}, got {value}; lower it, or leave it out for {one.default}")
    return value


def _check_whole(settings: Settings) -> None:
    """The rules that join two fields."""
    data, optimizer, loss = settings.data, settings.optimizer, settings.loss
    if not data.train:
        raise ConfigError(
            'data.train must name at least one file, got none; write train = ["texts/*.txt"] below [data]'
        )
    if not data.validation and data.validation_share == 0:
        raise ConfigError(
            "data.validation_share must be above 0 without data.validation, got 0; name files in data.validation, "
            "or give a share"
        )
    if optimizer.warmup > settings.steps:
        raise ConfigError(
            f"optimizer.warmup must be at most steps ({settings.steps}), got {optimizer.warmup}; lower it"
        )
    if settings.model.numerics == "published" and settings.model.published_from < 1:
        raise ConfigError(
            f"model.published_from must be 1 with numerics that are published all along, got "
            f'{settings.model.published_from}; leave it out, or write numerics = "plain"'
        )
    if loss.draft_only and loss.draft_from:
        raise ConfigError(
            f"loss.draft_from must be 0 with loss.draft_only, got {loss.draft_from}: nothing else would learn before; "
            "leave it out"
        )
    if loss.draft_only and not loss.draft:
        raise ConfigError("loss.draft must be above 0 with loss.draft_only, got 0; write draft = 1.0")


def _at_home(settings: Settings, home: Path) -> Settings:
    """The same with every path beginning at `home`."""

    def at(text: str) -> str:
        return text if text in ("", "tiny") else str(home / Path(text).expanduser())

    values = settings.to_dict()
    values["folder"] = str(home / Path(settings.folder).expanduser())
    values["model"] |= {key: at(values["model"][key]) for key in ("base", "tokenizer", "start")}
    values["data"] |= {key: tuple(map(at, values["data"][key])) for key in ("train", "validation")}
    return Settings.from_dict(values)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
