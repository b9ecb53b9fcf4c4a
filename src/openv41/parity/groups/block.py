"""block: what a layer has besides its attention (hyper-connections, router, experts, memory), and one whole layer."""

import torch
from torch import Tensor

from openv41.config import Config
from openv41.model.block import Block
from openv41.model.engram import Engram, Lookback, hash_plan, hash_rows
from openv41.model.experts import Experts, Router, SwiGLU
from openv41.model.layers import Stored
from openv41.model.streams import Streams
from openv41.ops import Ops
from openv41.parity.compare import EXACT, Bounds, Sheet, bounds
from openv41.parity.fill import ROUNDS, fill, model_config, weights_of
from openv41.parity.folder import BadCase, Case, Skip
from openv41.state import Cache, Ring, Sight, Step

COEFFICIENTS, ROUNDED, EXPANDED = Bounds(atol=5e-6), Bounds(max_ulp=1), Bounds(atol=0.02, min_equal=0.99)
Y, PRE, ROUTING = Bounds(atol=0.02, min_equal=0.99), Bounds(atol=5e-6), Bounds(rtol=2e-5, atol=1e-6)


def run(case: Case, ops: Ops, sheet: Sheet) -> None:
    for key, runner in KINDS:
        if key in case:
            return runner(case, ops, sheet)
    raise Skip(f"unknown kind of block case: it has none of {', '.join(key for key, _ in KINDS)}")


# Hyper-connections


def _coefficients(case: Case, ops: Ops, sheet: Sheet) -> None:
    """The op works the mixes out itself, as fn @ streams over the streams' root mean square. Streams that are zero but
    for one value, of root mean square 1, pick one column of fn: the mix wanted."""
    m, mixes = case.whole("hc_mult", least=1, most=64), case["mixes"]
    rows = mixes.flatten(0, -2)  # [n, m (m + 2)]
    side = 8  # streams of m * side^2 values each; side is a power of two, so dividing by it is exact
    width = (m * side) ** 2
    iters, found = case.whole("iters", least=1, most=ROUNDS), []
    for part in rows.split(width):
        streams, fn = torch.zeros(len(part), width), torch.zeros(rows.shape[1], width)
        streams[range(len(part)), range(len(part))] = m * side
        fn[:, : len(part)] = part.T / (m * side)
        shaped = streams.unflatten(1, (m, -1))
        found.append(ops.mix(shaped, fn, case["base"], case["scale"], iters, case.number("eps"), 1e-20))
    allowed = bounds(case.tolerance, "coefficients", otherwise=COEFFICIENTS)
    for what, parts in zip(("pre", "post", "comb"), zip(*found, strict=True), strict=True):
        sheet.compare(what, torch.cat(parts).unflatten(0, mixes.shape[:-1]), case[what], allowed)


def _collapse_expand(case: Case, ops: Ops, sheet: Sheet) -> None:
    x, tolerance = case["x"], case.tolerance  # [b, n, m, dim]
    streams = x.flatten(0, 1)
    numbers = case.whole("iters", least=1, most=ROUNDS), case.number("eps"), case.number("norm_eps")
    pre, post, comb = ops.mix(streams, case["fn"], case["base"], case["scale"], *numbers)
    coefficients = {"mix_pre": pre, "mix_post": post, "mix_comb": comb}
    sheet.compare_all(
        {what: (got.unflatten(0, x.shape[:2]), case[what]) for what, got in coefficients.items()},
        bounds(tolerance, "coefficients", otherwise=COEFFICIENTS),
    )
    read = ops.collapse(streams, case["pre_mix"].flatten(0, 1)).unflatten(0, x.shape[:2])
    sheet.compare("hc_pre", read, case["hc_pre"], bounds(tolerance, "hc_pre", otherwise=ROUNDED))
    written = ops.expand(case["sublayer_out"].flatten(0, 1), streams, post, comb).unflatten(0, x.shape[:2])
    sheet.compare("hc_post", written, case["hc_post"], bounds(tolerance, "hc_post", otherwise=EXPANDED))


# Layers


def _block(case: Case, ops: Ops, sheet: Sheet) -> None:
    config, x = model_config(case), case["x"]  # [b, n, m, dim]
    batch, tokens = x.shape[:2]
    block = Block(config, 0, ops)
    fill(block, weights_of(case), root="layers.0.")
    cache = Cache(config, batch, batch * tokens)
    image = case.find("image_mask")
    step = cache.step(
        ((cache.open(), [0] * tokens) for _ in range(batch)), image=None if image is None else image.flatten()
    )
    cache.admit(step)
    streams, _ = block(Streams(x.flatten(0, 1), case["pre_mix"].flatten(0, 1)), step, Sight(), cache)
    y, pre = streams.h.unflatten(0, (batch, -1)), streams.pre.unflatten(0, (batch, -1))
    sheet.compare("y", y, case["y"], bounds(case.tolerance, "y", otherwise=Y))
    allowed = bounds(case.tolerance, "next_pre_mix", otherwise=PRE)
    sheet.compare("next_pre_mix", pre, case["next_pre_mix"], allowed)


def _gate(case: Case, ops: Ops, sheet: Sheet) -> None:
    function = case.settings.get("score_func")
    if function not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise Skip(f"unknown score function {function!r}")
    x, weight = case["x"], case["weight"]
    scale, active = case.number("route_scale"), case.whole("topk", least=1)
    config = Config.tiny().replace(score_func=function, route_scale=scale)
    router = Router(config, weight.shape[0], active, ops)
    weights = {key: case[key] for key in ("weight", "bias", "bias_vl") if key in case}
    fill(router, weights, root="layers.0.ffn.gate.", loose=True)
    image = case.find("image_mask")
    routing, chosen = router(x, torch.zeros(len(x), dtype=torch.bool) if image is None else image)
    sheet.compare("indices", chosen, case["indices"], bounds(case.tolerance, "indices"))
    sheet.compare("weights", routing, case["weights"], bounds(case.tolerance, "weights", otherwise=ROUTING))


def _expert(case: Case, ops: Ops, sheet: Sheet) -> None:
    weights, x = weights_of(case), case["x"]
    stored: dict[torch.dtype, Stored] = {torch.float8_e4m3fn: "fp8", torch.uint8: "fp4", torch.bfloat16: "bf16"}
    w1 = weights.get("w1.weight")
    if w1 is None or w1.dtype not in stored or w1.dim() != 2:
        raise BadCase("w.w1.weight must be there, a matrix in fp8, fp4 or bf16")
    expert = SwiGLU(x.shape[-1], w1.shape[0], stored[w1.dtype], case.number("swiglu_limit"), ops)
    fill(expert, weights)
    pairs = {"y": (expert(x), case["y"]), "y_routed": (expert(x, case["routing"]), case["y_routed"])}
    sheet.compare_all(pairs, bounds(case.tolerance, "y", otherwise=Y))


def _moe(case: Case, ops: Ops, sheet: Sheet) -> None:
    config, x = model_config(case), case["x"]
    experts = Experts(config, config.n_routed_experts, config.n_activated_experts, ops)
    fill(experts, weights_of(case, "w.ffn."), root="layers.0.ffn.")
    rows, image = x.flatten(0, -2), case["image_mask"].flatten()
    pairs = {}
    for what, mask in (("y_text", torch.zeros_like(image)), ("y_image", image)):
        pairs[what] = experts(rows, mask).unflatten(0, x.shape[:-1]), case[what]
    sheet.compare_all(pairs, bounds(case.tolerance, "y", otherwise=Y))


# N-gram memory


def _hash(case: Case, ops: Ops, sheet: Sheet) -> None:
    """Rows for the n-grams of a prompt and of single steps after it, the history carried by the model's own ring."""
    config, ids = model_config(case), case["ids"]
    batch, tokens = ids.shape
    prompt = case["hash_prefill"].shape[1]
    lookback = Lookback(config)
    token_map = case.lender("token_map")["token_map"].long()
    if token_map.shape != lookback.token_map.shape:
        raise BadCase(f"token_map must have {len(lookback.token_map)} entries, has {list(token_map.shape)}")
    lookback.token_map.copy_(token_map)
    if "pad_compressed_id" in case.config:
        pad = int(token_map[config.engram_pad_id])
        sheet.require("pad_compressed_id", pad == case.config["pad_compressed_id"], f"the map sends the pad to {pad}")
    plans = [hash_plan(config, layer) for layer in config.engram_layer_ids]
    for what in ("primes", "offsets", "multipliers"):
        if what in case:
            ours = torch.stack([getattr(plan, what) for plan in plans])
            sheet.compare(what, ours.view_as(case[what]), case[what].long(), EXACT)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if "token_mask" in case:
        mask[:, : case["token_mask"].shape[1]] = case["token_mask"]
    tail = Ring(batch, max(1, config.engram_max_ngram_size - 1), 2, torch.int64, "cpu")

    def rows(start: int, end: int) -> Tensor:
        parts = [(slot, start, ids[slot, start:end]) for slot in range(batch)]
        ngrams = lookback(Step.pack(parts, image=~mask[:, start:end].flatten()), tail)
        return torch.stack([hash_rows(ngrams, plan) for plan in plans], 1).unflatten(0, (batch, -1))

    sheet.compare("hash_prefill", rows(0, prompt), case["hash_prefill"], bounds(case.tolerance))
    if prompt < tokens:
        decoded = torch.cat([rows(at, at + 1) for at in range(prompt, tokens)], 1)
        sheet.compare("hash_decode", decoded, case["hash_decode"], bounds(case.tolerance))


def _engram(case: Case, ops: Ops, sheet: Sheet) -> None:
    config, x = model_config(case), case["x"]  # [b, n, m, dim]
    weights = weights_of(case)
    rows = len(weights.get("embed.weight", ()))
    layers = dict(zip(config.engram_num_embeddings, config.engram_layer_ids, strict=False))
    if rows not in layers:
        raise BadCase(f"w.embed.weight has {rows} rows, config.engram_num_embeddings {list(layers)}")
    engram = Engram(config, layers[rows], ops)
    fill(engram, weights)
    seen = case["token_mask"] if "token_mask" in case else torch.ones(x.shape[:2], dtype=torch.bool)
    y = engram.recall(x.flatten(0, 1), case["hash_ids"].flatten(0, 1), seen.flatten())
    sheet.compare("y", y.unflatten(0, x.shape[:2]), case["y"], bounds(case.tolerance, "y", otherwise=Y))


KINDS = (
    ("mixes", _coefficients),
    ("sublayer_out", _collapse_expand),
    ("next_pre_mix", _block),
    ("indices", _gate),
    ("y_routed", _expert),
    ("y_text", _moe),
    ("hash_prefill", _hash),
    ("hash_ids", _engram),
)
"""The tensor by which a kind of case is known, and what is done with it."""
