"""The library's front room: `load` a model folder, then `generate`, `stream` and `score` text.

assistant = openv41.load("DeepSeek-V4.1-Flash")          # load() without a folder: the model of the package
print(assistant.generate("def fibonacci(n):", max_new_tokens=64).text)
for piece in assistant.stream("Once upon a time", temperature=0.8, seed=7):
    print(piece.text, end="", flush=True)
print(assistant.score("The sky is blue.").perplexity)
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

from openv41.config import Config
from openv41.errors import InputError
from openv41.generate.loop import CHUNK, Generation
from openv41.generate.policy import Length
from openv41.generate.sampling import Number
from openv41.generate.scoring import score
from openv41.generate.speculate import speculation_for
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.model.transformer import Transformer
from openv41.ops import Numerics, Ops, choose
from openv41.ops.cpu import native_bf16
from openv41.ops.fast import Weights
from openv41.texts import Completion, Prompt, Score, Stream, TokenScore
from openv41.weights.load import Checkpoint, Progress, load_into

if TYPE_CHECKING:
    from openv41.explain import Panel

SHIPPED = Path(__file__).parent / "mini"
"""Where the package has its own model, openv41-mini."""

Prompts = list[str] | list[Prompt] | list[str | Prompt] | tuple[str | Prompt, ...]


class Options(TypedDict, total=False):
    """How to continue prompts that are texts; see `Prompt` for what is not given."""

    max_new_tokens: int
    temperature: Number
    top_p: Number
    top_k: int
    stop: str | Sequence[str]
    seed: int


class Assistant:
    """A loaded model with its tokenizer."""

    def __init__(self, transformer: Transformer, tokenizer: Tokenizer, folder: Path) -> None:
        self.transformer, self.tokenizer, self.folder = transformer, tokenizer, folder

    @property
    def config(self) -> Config:
        return self.transformer.config

    @property
    def ops(self) -> Ops:
        return self.transformer.ops

    @overload
    def generate(self, prompt: str | Prompt, draft: Length = "auto", **options: Unpack[Options]) -> Completion: ...
    @overload
    def generate(self, prompt: Prompts, draft: Length = "auto", **options: Unpack[Options]) -> list[Completion]: ...
    def generate(
        self, prompt: str | Prompt | Prompts, draft: Length = "auto", **options: Unpack[Options]
    ) -> Completion | list[Completion]:
        """Continue a prompt, or several as one batch. A text gets `options`: see `stream`."""
        stream = self.stream(prompt, draft=draft, **options)
        for _ in stream:
            pass
        return stream.completions[0] if isinstance(prompt, str | Prompt) else stream.completions

    def stream(
        self,
        prompt: str | Prompt | Prompts,
        chunk: int | None = CHUNK,
        draft: Length = "auto",
        **options: Unpack[Options],
    ) -> Stream:
        """The continuation piece by piece, as it comes.

        `options` are those of `Prompt`, for every prompt that is a text: max_new_tokens=128, temperature=0.0 (0: the
        likeliest token), top_p=1.0, top_k=0 (0: all), stop=(), seed=0. A `Prompt` has its own. A text is encoded with
        the markers that it spells, after the begin id. Prompts are read in steps of `chunk` tokens.

        `draft`: how many tokens the model's draft proposes for a step to verify, "auto" (as many as pay, if there is a
        draft), "off" or 0, or a number up to `config.dspark_block_size`. It changes no likeliest text under row-stable
        operations, and no distribution of a sampled one: docs/speculation.md.

        Raises `InputError` for an empty prompt, one longer than the context, and options out of range.
        """
        given = [prompt] if isinstance(prompt, str | Prompt) else list(prompt)
        if options and not any(isinstance(one, str) for one in given):
            raise InputError(f"{', '.join(options)} must be set in each Prompt, not beside it; see dataclasses.replace")
        prompts = [
            Prompt(one, stream=place, **options) if isinstance(one, str) else one for place, one in enumerate(given)
        ]
        requests = [prompt.encode(self.tokenizer, self.config) for prompt in prompts]
        speculation = speculation_for(draft, self.transformer)
        generation = Generation(self.transformer, requests, self.tokenizer.special.eos, None, chunk, speculation)
        return Stream(self.tokenizer, prompts, generation)

    def score(self, text: str, top: int = 0) -> Score:
        """The log-probability of each token of `text` after the begin id, and with `top` the likeliest tokens there.

        Raises `InputError` for an empty text or one longer than the context.
        """
        if not text:
            raise InputError("the text to score must not be empty; give at least one character")
        scored = score(self.transformer, self.tokenizer.encode(text), top)
        tokens = [self._token(one.id, one.logprob, one.likeliest) for one in scored]
        return Score(tuple(tokens), len(text.encode()))

    def explain(self, component: str, machine: str = "h200", **question: Any) -> "Panel":
        """What a component takes, gives, keeps and costs in this model: `print` it, or take `to_dict()`.

        `question`: layer, mode ("decode" or "prefill"), position, tokens, batch, slack, ... as in
        `openv41.explain.Question`. Raises `InputError` for a component, layer or position that there is not.
        """
        from openv41.explain import Question, explain

        return explain(self.config, Question(component, **question), machine)

    def _token(self, id: int, logprob: float, likeliest: tuple[tuple[int, float], ...] = ()) -> TokenScore:
        return TokenScore(id, self.tokenizer.decode([id]), logprob, tuple(self._token(*pair) for pair in likeliest))

    def __repr__(self) -> str:
        layers, device = self.config.n_layers, self.transformer.embed.weight.device
        return f"<Assistant {self.folder}: {layers} layers on {device}, {self.ops.numerics} {self.ops.name} ops>"


def shipped() -> Path | None:
    """The folder of the model that is part of the package; None in an installation without it."""
    return SHIPPED if (SHIPPED / "config.json").is_file() else None


def load(
    folder: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    ops: str = "auto",
    numerics: Numerics = "published",
    weights: Weights | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Assistant:
    """A model folder in the published form, checked as a whole and loaded; without one openv41-mini, the package's own.

    `ops` is a set of operations (reference, fast, cpu; auto: the fastest that the device has), `numerics` published or
    plain. `weights` says what the cpu and fast sets keep of a quantised weight: "stored" dequantises it at every use,
    "cached", "bf16" and "fp32" keep it dequantised. Without it: "cached" if all of them take at most a quarter of the
    free memory, else "stored". `threads` sets torch's threads, for the whole process. Engram tables stay in their
    files, mapped.

    Strict: every tensor must fit the configuration, and the tokenizer must give Engram's compressed vocabulary.
    Raises `CheckpointError`, `ConfigError`, `InputError` or `OpsError`.
    """
    device = find_device(device)
    _set_threads(threads)
    checkpoint = Checkpoint.open(_own_model() if folder is None else Path(folder))
    config = checkpoint.config
    tokenizer = Tokenizer.open(checkpoint.folder)
    compressed = config.engram_compressed_vocab_size if config.engram_layer_ids else None
    token_map = compress_vocabulary(tokenizer, config.vocab_size, compressed)
    transformer = _unfilled(config, _choose(checkpoint, device, ops, numerics, weights))
    load_into(transformer, checkpoint, progress, device)
    if transformer.lookback is not None:
        transformer.lookback.token_map = token_map.to(device)
    return Assistant(transformer, tokenizer, checkpoint.folder)


def _own_model() -> Path:
    folder = shipped()
    if folder is None:
        raise InputError(
            f"this installation has no openv41-mini ({SHIPPED} holds no model); give a model folder, or make one with "
            "openv41 tiny"
        )
    return folder


def _unfilled(config: Config, ops: Ops) -> Transformer:
    """The modules on no device: loading makes each parameter where it belongs, or maps it from its file."""
    with torch.device("meta"):
        return Transformer(config, ops)


# Choices


def find_device(device: str | torch.device) -> torch.device:
    """The device, which must be there. Raises `InputError`."""
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device must be cpu, cuda or cuda:0, got {device!r}; {str(error).splitlines()[0]}") from error
    count = torch.cuda.device_count()
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise InputError(f"device must be one that torch sees, got {device!r} with {count} GPUs; use cpu")
    return chosen


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if type(threads) is not int or threads < 1:
        raise InputError(f"threads must be a whole number, 1 or more, got {threads!r}; leave it out for torch's choice")
    torch.set_num_threads(threads)


def _choose(checkpoint: Checkpoint, device: torch.device, ops: str, numerics: Numerics, weights: Weights | None) -> Ops:
    if ops != "reference":
        return choose(device, ops, numerics, weights=weights or _fitting_weights(checkpoint, device))
    if weights is not None:
        raise InputError(f"weights={weights!r} must go with the cpu or fast set of ops, got ops={ops!r}; leave it out")
    return choose(device, ops, numerics)


def _fitting_weights(checkpoint: Checkpoint, device: torch.device) -> Weights:
    """Dequantised weights are kept where they take a quarter of the free memory at most."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory()
    return "cached" if dequantised_bytes(checkpoint, on_gpu or native_bf16()) <= free // 4 else "stored"


def dequantised_bytes(checkpoint: Checkpoint, bf16: bool | None = None) -> int:
    """Bytes of the quantised weights in bf16, or else in float32; if nothing is said, in what the CPU multiplies in.
    Engram tables are only looked up."""
    specs = checkpoint.specs
    values = 0
    for name, spec in specs.items():
        scale = name.removesuffix("weight") + "scale"
        if name.endswith(".weight") and scale in specs and ".engram.embed." not in name:
            values += prod(spec.shape) * (2 if spec.dtype == "I8" else 1)  # two fp4 codes a byte
    return values * (2 if (native_bf16() if bf16 is None else bf16) else 4)


def free_memory() -> int:
    """Bytes that new data can take without swapping: what Linux calls available, within the container's limit. 0 where
    nothing tells."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
    try:
        group = Path("/sys/fs/cgroup")
        limit, used, details = ((group / f"memory.{kind}").read_text() for kind in ("max", "current", "stat"))
        cached = int(dict(line.split() for line in details.splitlines())["inactive_file"])
        return min(available, max(0, int(limit) - int(used) + cached))
    except (OSError, KeyError, ValueError):  # no container, or one without a limit ("max")
        return available
