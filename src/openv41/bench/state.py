"""State: bytes, how long the cache's verbs take, what a half-depth prefill saves, what a bounded replay loses.

A small model with random weights, of the released model's shape (its last KV source half-way up), stands for times and
errors that need a whole model; one source, one reader and one re-scorer at the released sizes for memory.
"""

import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from openv41.bench.layer import fill
from openv41.bench.measure import Timing, measure
from openv41.bench.results import Agreement, Figure, Report, Settings
from openv41.config import Config
from openv41.formats import INDEX, LATENT, WINDOW
from openv41.generate.prefix import PrefixStore
from openv41.model.attention import Attention
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.plan import plan_layers
from openv41.state import Cache, Sight, Step
from openv41.state.kinds import bytes_of_slot
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.tiny import write_tiny

PROMPT, HELD, KNOWN, CHUNK = 32768, 4096, 131072, 1024
"""Tokens of the half-depth prefill; tokens that slots hold when verbs are timed; positions of the released caches, and
tokens of the chunk that is run on them."""
HITS = (1, 4, 16, 64, 256, 1024, 4096)


@torch.no_grad()
def run(settings: Settings, progress: Callable[[str], None]) -> Report:
    """Compare half-depth with full prefill and packed with wide storage under the reference, then take the figures."""
    progress("comparing halo with full prefill, and packed with wide storage, under the reference")
    agreement = _agreement()
    figures: tuple[Figure, ...] = ()
    model = small_model("cpu")
    config = model.config
    if agreement.passed:
        phases = (_bytes(), _verbs(model, settings.repeats), _halo(model, progress), _bounded(model, progress))
        figures = tuple(figure for phase in phases for figure in phase) + tuple(_released(progress))
    subject = f"{config.n_layers} layers of width {config.dim}, window {config.window_size}; released sizes where said"
    return Report("state", subject, settings, agreement, figures, ABOUT if figures else ())


ABOUT = (
    "Ratios are of two runs of the same prompt in this process; FLOPs are of matrix products, counted as they run.",
    "Errors are the largest difference of a logit, over the largest logit, at the first token behind the hit.",
)


def small_model(ops: str) -> Transformer:
    """The small checkpoint with a context of 131,072 under the given operations."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(f"{folder}/tiny")
        checkpoint = Checkpoint.open(f"{folder}/tiny")
        config = checkpoint.config.replace(original_seq_len=8192)
        chosen = choose("cpu", ops, weights="cached") if ops == "cpu" else choose("cpu", ops)
        model = Transformer(config, chosen, draft=False)
        load_into(model, checkpoint, without=("mtp.",))
    if model.lookback is not None:
        model.lookback.token_map.copy_(torch.arange(config.vocab_size) % config.engram_compressed_vocab_size)
    return model


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 900, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _agreement() -> Agreement:
    model, ids = small_model("reference"), ids_of(300)
    config = model.config
    runs = {
        "full": _prefill(model, ids, "full", Cache(config, 1, 400)),
        "halo": _prefill(model, ids, "halo", Cache(config, 1, 400)),
        "packed": _prefill(model, ids, "halo", Cache(config, 1, 400, store="packed")),
    }
    other = [name for name in ("halo", "packed") if not torch.equal(runs[name], runs["full"])]
    share = 1 - len(other) / 2
    failures = tuple(f"{name} gives other logits than the full pass" for name in other)
    return Agreement("all logits have the same bits", 2 * runs["full"].numel(), share, share, failures)


def _prefill(model: Transformer, ids: list[int], prefill: str, cache: Cache) -> Tensor:
    slot = cache.open()
    logits = model(cache.step([(slot, ids)]), cache, prefill="halo" if prefill == "halo" else "full").logits
    return torch.cat((logits, model(cache.step([(slot, [5])]), cache).logits))


def _bytes() -> Iterator[Figure]:
    sizes = bytes_of_slot(Config.released())
    yield Figure("bytes_per_token", "released model, packed: a token", sum(sizes.per_token.values()), "bytes")
    yield Figure("bytes_per_slot", "a slot, whatever its length", sum(sizes.fixed.values()), "bytes")
    wide = bytes_of_slot(Config.released(), packed=False)
    yield Figure("wide_bytes_per_token", "the same in bf16 rows: a token", sum(wide.per_token.values()), "bytes")


def _verbs(model: Transformer, repeats: int) -> Iterator[Figure]:
    cache = Cache(model.config, 2, 2 * HELD, slack=5, store="packed")
    slot = cache.open()
    model(cache.step([(slot, ids_of(HELD - 1))]), cache)

    def rewind() -> None:
        cache.rewind(slot, cache.length(slot))

    def fork() -> None:
        cache.close(cache.fork(slot))

    for name, timing in measure({"rewind": rewind, "fork": fork}, 20 * repeats).items():
        in_us = Timing(1e3 * timing.median, 1e3 * timing.fastest, 1e3 * timing.slowest, timing.repeats)
        what = f"{name} a slot of {HELD:,} tokens" + (" and close it" if name == "fork" else "")
        yield Figure(f"{name}_us", what, in_us.median, "us", in_us)


def _halo(model: Transformer, progress: Callable[[str], None]) -> Iterator[Figure]:
    ids, seconds, flops = ids_of(PROMPT), {}, {}
    for prefill in ("halo", "full"):
        progress(f"a prompt of {PROMPT:,} tokens, {prefill}, timed and counted")
        with FlopCounterMode(display=False) as counter:
            begin = perf_counter()
            _prefill(model, ids, prefill, Cache(model.config, 1, PROMPT + 64))
            seconds[prefill] = perf_counter() - begin
        flops[prefill] = counter.get_total_flops()
    yield Figure("full_s", f"prefill of {PROMPT:,} tokens, all layers", seconds["full"], "s")
    yield Figure("halo_s", "the same, half-depth", seconds["halo"], "s")
    yield Figure("halo_time_ratio", "half-depth over full: time", seconds["halo"] / seconds["full"], "")
    yield Figure("halo_flop_ratio", "half-depth over full: FLOPs", flops["halo"] / flops["full"], "")


def _bounded(model: Transformer, progress: Callable[[str], None]) -> Iterator[Figure]:
    progress("bounded and exact replay at hits of 1 to 4,096 tokens, under the reference")
    reference = small_model("reference")
    ids = ids_of(HITS[-1] + 1, 1)
    cache = Cache(model.config, 4, 3 * len(ids))
    slot = cache.open()
    for first in range(0, len(ids), 512):
        reference(cache.step([(slot, ids[first : first + 512])], "none"), cache)
    for hit in HITS:
        logits = {}
        for replay in ("exact", "bounded"):
            kept = PrefixStore(reference, cache, 1, "exact" if replay == "exact" else "bounded")
            kept.keep(slot, ids)
            begun, _ = kept.begin(ids[: hit + 1])
            logits[replay] = reference(cache.step([(begun, [ids[hit]])]), cache).logits
            cache.close(begun)
            kept.drop(next(iter(kept.kept)))
        error = float((logits["bounded"] - logits["exact"]).abs().max() / logits["exact"].abs().max())
        yield Figure(f"bounded_error_{hit}", f"bounded replay, hit of {hit:,}", error, "of the largest logit")


def _released(progress: Callable[[str], None]) -> Iterator[Figure]:
    """A source, a reader and a re-scorer at the released sizes on packed caches, one token and one chunk of each. A
    process each, since what is told is the most memory that the process ever held."""
    for number in (20, 21, 24):
        progress(f"layer {number} on {KNOWN:,} positions: a token and a chunk of {CHUNK:,}")
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            yield from alone.submit(_released_layer, number, torch.get_num_threads()).result()


@torch.no_grad()
def _released_layer(number: int, threads: int) -> list[Figure]:
    torch.set_num_threads(threads)
    config = Config.released()
    plan = plan_layers(config)
    layer = Attention(config, number, choose("cpu", "cpu", weights="cached"))
    fill(layer)
    cache = Cache(config, 1, KNOWN + CHUNK + 64, layers=[plan[n] for n in sorted({20, number})], store="packed")
    slot = _fill_packed(cache, KNOWN)
    figures = []
    for name, count in (("token", 1), ("chunk", CHUNK)):
        step = cache.step([(slot, [0] * count)])
        cache.admit(step)
        sight = _handed_down(cache, step, config)
        x = torch.randn(count, config.dim, generator=torch.Generator().manual_seed(count)).to(torch.bfloat16)
        layer(x[:1], step, sight, cache) if count == 1 else None  # keeps the weights
        begin = perf_counter()
        layer(x, step, sight, cache)
        what = f"layer {number}, {plan[number].role.value}: " + ("a token" if count == 1 else f"a chunk of {count:,}")
        took, note = (perf_counter() - begin) * 1e3, f"{_peak() / 2**20:,.0f} MiB at the process's peak"
        figures.append(Figure(f"layer_{number}_{name}_ms", what, took, "ms", note=note))
    held = sum(size for kind, size in cache.nbytes().items() if kind in ("latents", "keys", "window")) / 2**20
    return [*figures, Figure(f"layer_{number}_mib", f"layer {number}: latents, keys and windows held", held, "MiB")]


def _fill_packed(cache: Cache, length: int) -> int:
    """A slot of `length` tokens whose rows are random records."""
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, width: int) -> Tensor:
        return torch.randn(count, width, generator=generator)

    slot = cache.open()
    known = Step.pack([(slot, 0, torch.zeros(length, dtype=torch.int64))])
    cache.admit(known)
    cache.extend(known)
    config = cache.config
    for source in cache.sources.values():
        count = length // source.latents.ratio
        pieces = [min(8192, count - first) for first in range(0, count, 8192)]  # the peak is to be the layer's
        source.latents.put(slot, torch.cat([LATENT.to_records(rows(n, config.head_dim)) for n in pieces]))
        source.keys.put(slot, torch.cat([INDEX.to_records(rows(n, config.index_head_dim)) for n in pieces]))
    for ring in cache.windows.values():
        ring.put(slot, length, WINDOW.to_records(rows(config.window_size, config.head_dim)))
    return slot


def _handed_down(cache: Cache, step: Step, config: Config) -> Sight:
    """What the source would hand down: its tables, the newest positions as picks, the newest blocks as candidates."""
    source = cache.sources[20]
    newest = step.visible(1).unsqueeze(1)
    picks = newest - config.index_topk + torch.arange(config.index_topk)
    block = config.candidate_block_size
    blocks = torch.arange(-(-int(newest.max()) // block))
    last = (newest - 1) // block
    candidates = (blocks <= last) & (blocks > last - config.candidate_topk_blocks)
    return Sight(source.latents, source.keys, picks, source.latents.rows(step.slot, picks), candidates)


def _peak() -> int:
    """Bytes that the process has held at most. Where the system tells it, that of this program alone: the other figure
    begins at what the parent held when it started this process."""
    status = Path("/proc/self/status")
    if status.exists():
        held = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(held.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
