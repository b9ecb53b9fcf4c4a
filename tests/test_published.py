"""The published interface: golden cases through it, rows and positions, and every call out of order."""

import copy
import gc
import json
import pickle
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small import fill_randomly, small_config
from torch import Tensor

from openv41 import formats, published
from openv41.config import KEYS, Config
from openv41.errors import CacheError, CacheFull, ConfigError, InputError
from openv41.model.indexer import IndexKeys
from openv41.ops import choose
from openv41.published import Attention, ModelArgs, Shared

DATA = Path(__file__).parent / "data"
GOLDEN = Path(__file__).parent / "golden"
ONE_BYTE = {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e8m0fnu")}


@lru_cache
def index() -> dict[str, dict[str, dict]]:
    groups = json.loads((GOLDEN / "index.json").read_text())["groups"]
    return {group: {case["name"]: case for case in cases} for group, cases in groups.items()}


def golden(group: str, case: str, start: str = "") -> dict[str, Tensor]:
    """A case's tensors in their true types, those whose names begin with `start`, without it."""
    entry = index()[group][case]
    with safe_open(GOLDEN / entry["file"], "pt") as file:
        found = {key: file.get_tensor(f"{case}/{key}") for key in entry["tensors"] if key.startswith(start)}
    types = {key: ONE_BYTE.get(entry["tensors"][key]["dtype"]) for key in found}
    return {key.removeprefix(start): value.view(types[key] or value.dtype) for key, value in found.items()}


def names(group: str, start: str) -> list[str]:
    return [name for name in index()[group] if name.startswith(start)]


def args_of(group: str, case: str) -> ModelArgs:
    known = asdict(ModelArgs()).keys()
    return ModelArgs(**{key: value for key, value in index()[group][case]["config"].items() if key in known})


def small_stack(count: int = 6, args: ModelArgs | None = None, index_keys: IndexKeys = "own_keys") -> list[Attention]:
    """Layers 0, 1, ... of a stack with random weights, the same at each call. A row's bits depend on no other row."""
    args, ops = args or small_args(), choose("cpu", "reference")
    layers = [Attention(layer, args, index_keys=index_keys, ops=ops) for layer in range(count)]
    for layer, attention in enumerate(layers):
        fill_randomly(attention, layer)
    return layers


def small_args(**changes: object) -> ModelArgs:
    return ModelArgs(**(vars(small_config(engram_layer_ids=(), engram_num_embeddings=())) | changes), max_batch_size=3,
                     max_seq_len=64)  # fmt: skip


def inputs(rng: torch.Generator, rows: int, count: int) -> Tensor:
    return torch.randn(rows, count, 64, generator=rng).bfloat16()


def run(layers: list[Attention], x: Tensor, lengths: list[int]) -> Tensor:
    """Results [layers, b, s, dim] of the same inputs for every layer, fed in pieces of these lengths from 0 on."""
    results, first = [], 0
    for length in lengths:
        results.append(torch.stack([layer(x[:, first : first + length], first) for layer in layers]))
        first += length
    return torch.cat(results, 2)


def test_the_example_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "published.md").read_text()
    names: dict[str, object] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    assert names["y"].shape == (2, 1, 128)


# Golden cases


@pytest.mark.parametrize("name", ["fp8_as_written", "fp8_own_keys", "bf16_as_written", "bf16_own_keys"])
def test_six_layers_of_every_role(name: str) -> None:
    base = name.replace("own_keys", "as_written")
    entry = index()["stack"][base]
    first, count = entry["config"]["prefill"], entry["config"]["prefill"] + entry["config"]["steps"]
    args = args_of("stack", base)
    layers = [
        Attention(layer, args, index_keys="own_keys" if name.endswith("own_keys") else "as_written")
        for layer in range(args.n_layers)
    ]
    for layer, attention in enumerate(layers):
        attention.load_state_dict(golden("stack", base, f"w.{layer}."))
    x, wanted = golden("stack", base, "x."), golden("stack", base) | golden("stack", name)

    y: dict[int, list[Tensor]] = {layer: [] for layer in range(args.n_layers)}
    for start, end in [(0, first), *((at, at + 1) for at in range(first, count))]:
        for layer, attention in enumerate(layers):
            y[layer].append(attention(x[str(layer)][:, start:end], start))
        if start == 0:
            compare_caches(layers, wanted, "prefill")
    compare_caches(layers, wanted, "end")

    for layer, attention in enumerate(layers):
        if f"y.{layer}" not in golden("stack", name):
            continue  # the case states what can differ from the other
        # Equal scores at the border of the picks leave it open which are taken, here and in all that reads them.
        plan = attention.plan
        tied = [wanted[f"tie.{source}"] for source in {plan.picks_from, plan.within} - {None}]
        sure = ~torch.stack([*tied, torch.zeros(2, count, dtype=torch.bool)]).any(0)
        ours, theirs = torch.cat(y[layer], 1)[sure], wanted[f"y.{layer}"][sure]
        bounds = entry["tolerance"]["y"]["torch on CPU"]
        assert (ours == theirs).float().mean() >= bounds["min_equal"], layer
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bounds["atol"])


def compare_caches(layers: list[Attention], wanted: dict[str, Tensor], when: str) -> None:
    for number, layer in enumerate(layers):
        cache = layer.cache
        assert equal(cache.windows[number].table, wanted[f"{when}.window_kv.{number}"]) >= 0.995
        if number in layer.config.kv_source_layers:
            for kind, name in (("latents", "compress_kv"), ("keys", "index_k")):
                rows = torch.stack([cache.view(kind, number, row) for row in range(2)])
                assert equal(rows, wanted[f"{when}.{name}.{number}"]) >= 0.995


def equal(ours: Tensor, theirs: Tensor) -> float:
    return (ours == theirs).float().mean().item()


@pytest.mark.parametrize("prefill", [1, 13, 16, 17, 39])
def test_a_window_and_its_ring(prefill: int) -> None:
    data = golden("window", f"ring_prefill{prefill}")
    layer = Attention(0, args_of("window", "ring_weights"))
    layer.load_state_dict(golden("window", "ring_weights", "w."))
    y = [layer(data["x"][:, :prefill], 0)]
    rings = {"after_prefill": layer.cache.windows[0].table[:1].clone()}
    for at in range(prefill, data["x"].shape[1]):
        y.append(layer(data["x"][:, at : at + 1], at))
        rings[f"after_step{at - prefill + 1}"] = layer.cache.windows[0].table[:1].clone()
    rings["end"] = layer.cache.windows[0].table[:1]
    torch.testing.assert_close(torch.cat(y, 1), data["y"], rtol=0, atol=0.02)
    for when in ("after_prefill", "after_step1", "after_step4", "end"):
        assert equal(rings[when], data[f"ring_{when}"]) >= 0.995, when


@pytest.mark.parametrize("name", ["table_window", "table_compress"])
def test_rotary_tables_are_equal_bit_for_bit(name: str) -> None:
    c, data = index()["rope"][name]["config"], golden("rope", name)
    # Up to the last position but one: the whole context in one table would take half a gigabyte on the way.
    positions = data["positions"][data["positions"] < 2**18]
    table = published.precompute_freqs_cis(
        c["rope_head_dim"], 2**18, c["original_seq_len"], c["theta"], c["factor"], c["beta_fast"], c["beta_slow"]
    )
    assert len(positions) == len(data["positions"]) - 1
    assert table.dtype == torch.complex64 and table.shape == (2**18, c["rope_head_dim"] // 2)
    rows = table[positions]
    assert torch.equal(rows.real, data["cos"][:-1]) and torch.equal(rows.imag, data["sin"][:-1])


@pytest.mark.parametrize("name", ["bfloat16_3d", "bfloat16_4d", "float32_3d", "float32_4d"])
def test_rotation_is_in_place_and_equal_bit_for_bit(name: str) -> None:
    data = golden("rope", f"apply_{name}")
    freqs = torch.complex(data["cos"], data["sin"])
    for inverse, wanted in ((False, data["forward"]), (True, data["inverse"])):
        whole = torch.zeros(*data["x"].shape[:-1], 24, dtype=data["x"].dtype)
        whole[..., 8:] = data["x"]
        tail = whole[..., 8:]
        assert published.apply_rotary_emb(tail, freqs, inverse) is tail
        assert torch.equal(whole[..., 8:], wanted) and not whole[..., :8].any()


def test_rotation_names_shapes_that_do_not_fit() -> None:
    freqs = published.precompute_freqs_cis(8, 5, 0, 10000, 1, 32, 1)
    with pytest.raises(InputError, match="rotary part"):
        published.apply_rotary_emb(torch.zeros(1, 5, 16), freqs)
    with pytest.raises(InputError, match="positions"):
        published.apply_rotary_emb(torch.zeros(1, 4, 8), freqs)


@pytest.mark.parametrize("name", names("sparse_attn", ""))
def test_sparse_attention_is_equal_bit_for_bit(name: str) -> None:
    data = golden("sparse_attn", name)
    scale = index()["sparse_attn"][name]["config"]["scale"]
    out = published.sparse_attn(data["q"], data["kv"], data["sink"], data["idx"], scale)
    assert torch.equal(out.nan_to_num(7), data["out"].nan_to_num(7)) and torch.equal(out.isnan(), data["out"].isnan())


# Quantisers


@pytest.mark.parametrize(
    ("quantise", "form", "keywords"),
    [
        (published.act_quant, formats.WINDOW, {}),
        (published.act_quant, formats.FLOAT8, {"block_size": 64, "scale_fmt": None}),
        (published.fp4_act_quant, formats.INDEX, {}),
        (published.fp4_act_quant, formats.LATENT, {"block_size": 16, "scale_dtype": torch.float8_e4m3fn}),
    ],
)
def test_quantisers_are_the_formats(quantise, form, keywords, rng: torch.Generator) -> None:
    x = (torch.randn(3, 5, 64, generator=rng) * 9).bfloat16()
    codes, scale = quantise(x, **keywords)
    assert codes.dtype == (torch.float8_e4m3fn if form.codes_per_byte == 1 else torch.float4_e2m1fn_x2)
    assert torch.equal(codes.view(torch.uint8), form.pack(x)[0].view(torch.uint8))
    assert torch.equal(scale.float(), form.pack(x)[1].float())
    y = x.clone()
    assert quantise(y, **keywords, inplace=True) is y
    assert torch.equal(y, form.round(x)) and not torch.equal(y, x)


def test_quantisers_name_what_they_do_not_know() -> None:
    x = torch.zeros(2, 48, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="block_size"):
        published.act_quant(x)
    with pytest.raises(InputError, match="scale_fmt"):
        published.act_quant(x, 16, "e4m3")
    with pytest.raises(InputError, match="scale_dtype"):
        published.fp4_act_quant(x, 16, torch.float32)


# Arguments


def test_the_defaults_are_the_released_model() -> None:
    assert ModelArgs().config() == Config.released()
    assert asdict(ModelArgs()).keys() - set(KEYS) == {
        "max_batch_size", "max_seq_len", "temperature", "gate_temp", "norm_topk_prob",
    }  # fmt: skip
    for name in ("inference_config.json", "hf_config.json"):
        assert ModelArgs.from_json(DATA / name) == ModelArgs()


def test_a_file_may_hold_the_other_keys_too(tmp_path: Path) -> None:
    values = Config.tiny().to_dict() | {"max_batch_size": 2, "max_seq_len": 99, "temperature": 0.5}
    (tmp_path / "args.json").write_text(json.dumps(values))
    args = ModelArgs.from_json(tmp_path / "args.json")
    assert (args.max_batch_size, args.max_seq_len, args.temperature) == (2, 99, 0.5) and args.config() == Config.tiny()
    del values["dim"]
    (tmp_path / "args.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="dim"):
        ModelArgs.from_json(tmp_path / "args.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelArgs.from_json(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("gate_temp", 0.5), ("norm_topk_prob", False), ("max_seq_len", 0), ("max_batch_size", 0), ("dim", 9)],
)
def test_arguments_are_checked(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        replace(ModelArgs(), **{key: value}).config()


def test_arguments_are_copied_without_the_stack_built_from_them() -> None:
    args = small_args()
    first = small_stack(1, args)
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), replace(args)):
        assert other == args
        assert Attention(1, other).shared is not first[0].shared
    assert Attention(1, args).shared is first[0].shared


# Parameters


@pytest.mark.parametrize("case", ["fp8_as_written", "bf16_as_written"])
def test_published_state_dicts_load_and_come_back(case: str) -> None:
    args = args_of("stack", case)
    for layer in range(args.n_layers):
        tensors = golden("stack", case, f"w.{layer}.")
        attention = Attention(layer, args)
        assert str(attention.load_state_dict(tensors)) == "<All keys matched successfully>"
        state = attention.state_dict()
        assert state.keys() == tensors.keys()
        for name, value in state.items():
            assert value.dtype == tensors[name].dtype
            assert torch.equal(value.float(), tensors[name].float()), name


def test_a_checkpoint_s_fp8_output_weight_loads_too() -> None:
    args = args_of("stack", "fp8_as_written")
    tensors = golden("stack", "fp8_as_written", "w.0.")
    codes, scale = formats.pack_fp8_weight(tensors["wo_a.weight"])
    stored = {f"attn.{name}": value for name, value in tensors.items()}
    stored |= {"attn.wo_a.weight": codes, "attn.wo_a.scale": scale}
    parent = torch.nn.ModuleDict({"attn": Attention(0, args)})
    parent.load_state_dict(stored)
    assert torch.equal(parent["attn"].wo_a.weight.float(), formats.unpack_weight(codes, scale))
    assert stored["attn.wo_a.weight"] is codes  # the caller's dict is as it was


def test_missing_and_unknown_parameters_are_refused() -> None:
    args = args_of("stack", "fp8_as_written")
    tensors = golden("stack", "fp8_as_written", "w.0.")
    with pytest.raises(RuntimeError, match="compressor.wgate"):
        Attention(1, args).load_state_dict(tensors)
    with pytest.raises(RuntimeError, match="indexer.wk"):
        Attention(5, args).load_state_dict(golden("stack", "fp8_as_written", "w.3."))


# Rows, positions, stacks


@pytest.mark.parametrize("lengths", [[11, 1, 1, 1, 1], [1] * 15, [2, 5, 1, 7]])
def test_pieces_give_the_same_bits(lengths: list[int], rng: torch.Generator) -> None:
    x = inputs(rng, 2, 15)
    assert torch.equal(run(small_stack(), x, lengths), run(small_stack(), x, [15]))


def test_a_smaller_batch_is_the_first_rows(rng: torch.Generator) -> None:
    layers, x = small_stack(), inputs(rng, 3, 12)
    everything = run(layers, x, [7, 1, 1, 1, 1, 1])
    assert torch.equal(run(layers, x[:1], [9, 1, 1, 1]), everything[:, :1])
    assert torch.equal(run(small_stack(), x[:2], [7, 1, 1, 1, 1, 1]), everything[:, :2])
    # The rows that were not named stand where they stood, and go on.
    more, alone = inputs(rng, 3, 1), small_stack()
    run(alone, x[:1], [12])
    run(alone, x, [12])
    for layer, other in zip(layers, alone, strict=True):
        assert torch.equal(layer(more, 12), other(more, 12))


def test_a_prefill_begins_anew(rng: torch.Generator) -> None:
    layers, long, short = small_stack(), inputs(rng, 2, 20), inputs(rng, 2, 9)
    run(layers, long, [19, 1])
    assert torch.equal(run(layers, short, [5, 1, 1, 1, 1]), run(small_stack(), short, [9]))
    run(layers, short, [9])
    assert torch.equal(run(layers, short, [9]), run(small_stack(), short, [9]))  # the same shape again


def test_two_stacks_in_turn(rng: torch.Generator) -> None:
    x, y = inputs(rng, 2, 12), inputs(rng, 2, 12)
    args = small_args()
    one, two = small_stack(args=args), small_stack(args=args)
    assert {layer.shared for layer in one}.isdisjoint(layer.shared for layer in two)
    got: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first, end in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        pairs = [(a(x[:, first:end], first), b(y[:, first:end], first)) for a, b in zip(one, two, strict=True)]
        for results, part in zip(got, zip(*pairs, strict=True), strict=True):
            results.append(torch.stack(part))
    assert torch.equal(torch.cat(got[0], 2), run(small_stack(), x, [12]))
    assert torch.equal(torch.cat(got[1], 2), run(small_stack(), y, [12]))


def test_layers_may_be_built_in_any_order_with_a_shared_of_one_s_own(rng: torch.Generator) -> None:
    args, shared, x = small_args(), Shared(), inputs(rng, 1, 6)
    layers = [Attention(layer, args, shared, ops=choose("cpu", "reference")) for layer in (2, 0, 1)]
    for layer in layers:
        fill_randomly(layer, layer.layer)
    in_order = sorted(layers, key=lambda layer: layer.layer)
    assert torch.equal(run(in_order, x, [5, 1]), run(small_stack(3), x, [6]))


def test_a_stack_is_copied_whole(rng: torch.Generator) -> None:
    layers, x = small_stack(), inputs(rng, 1, 8)
    run(layers, x[:, :7], [7])
    twin = copy.deepcopy(torch.nn.ModuleList(layers))
    wanted = [layer(x[:, 7:], 7) for layer in layers]
    assert all(torch.equal(layer(x[:, 7:], 7), y) for layer, y in zip(twin, wanted, strict=True))


def test_the_arguments_do_not_keep_a_stack_alive() -> None:
    args = small_args()
    layers = small_stack(1, args)
    del layers
    gc.collect()
    assert Attention(1, args).shared.layers == [1]


def test_the_published_decode_differs_only_in_a_step_without_a_latent(rng: torch.Generator) -> None:
    """Far enough along that the keys of another layer do not by chance give the same picks."""
    x = inputs(rng, 2, 26)
    own = run(small_stack(), x, [21, 1, 1, 1, 1, 1])
    written = run(small_stack(index_keys="as_written"), x, [21, 1, 1, 1, 1, 1])
    differs = (own != written).any(-1).any(1)  # [layers, positions]
    assert differs[1:3, 22:].any() and not differs[:, :21].any() and not differs[:, 21::2].any()
    assert not differs[[0, 3, 4, 5]].any()
    assert torch.equal(run(small_stack(index_keys="as_written"), x, [21, 5]), own)  # a longer piece has no fault


def test_no_gradients_are_kept(rng: torch.Generator) -> None:
    assert not small_stack(1)[0](inputs(rng, 1, 3).requires_grad_(), 0).requires_grad


# Calls out of order


@pytest.mark.parametrize("start", [4, 6, 1])
def test_a_position_skipped_or_repeated(start: int, rng: torch.Generator) -> None:
    layer = small_stack(1)[0]
    layer(inputs(rng, 2, 5), 0)
    with pytest.raises(CacheError, match=f"layer 0, row 0: start_pos is {start}, but the next position is 5"):
        layer(inputs(rng, 2, 1), start)
    assert layer(inputs(rng, 2, 1), 5).shape == (2, 1, 64)  # nothing was lost


def test_a_step_before_any_prefill(rng: torch.Generator) -> None:
    with pytest.raises(CacheError, match="the next position is 0"):
        small_stack(1)[0](inputs(rng, 1, 1), 3)


def test_rows_that_stand_elsewhere(rng: torch.Generator) -> None:
    layer = small_stack(1)[0]
    layer(inputs(rng, 3, 5), 0)
    layer(inputs(rng, 2, 1), 5)
    with pytest.raises(CacheError, match="row 2: start_pos is 6, but the next position is 5"):
        layer(inputs(rng, 3, 1), 6)


def test_a_reader_before_its_source(rng: torch.Generator) -> None:
    layers, x = small_stack(), inputs(rng, 2, 5)
    with pytest.raises(CacheError, match="layer 2 reads what layer 1 hands down, which has not run"):
        layers[2](x, 0)
    run(layers, x, [5])
    with pytest.raises(CacheError, match="layer 2 is called with 2 rows at positions 5 to 5, but layer 1"):
        layers[2](x[:, :1], 5)
    with pytest.raises(CacheError, match="layer 5 .* 2 rows at positions 0 to 4 before that"):
        layers[5](x, 0)  # the same shape as before, but layer 3 has not begun anew


def test_layers_that_are_called_with_other_rows(rng: torch.Generator) -> None:
    layers, x = small_stack(), inputs(rng, 2, 5)
    layers[1](x, 0)
    with pytest.raises(CacheError, match="layer 2 is called with 1 rows"):
        layers[2](x[:1], 0)
    with pytest.raises(CacheError, match="layer 2 is called with 2 rows at positions 0 to 3"):
        layers[2](x[:, :4], 0)
    layers[2](x, 0)


def test_a_reader_alone(rng: torch.Generator) -> None:
    alone = Attention(2, small_args())
    with pytest.raises(CacheError, match=r"layer 1 hands down, which is not in its stack \(\[2\]\)"):
        alone(inputs(rng, 1, 2), 0)


def test_as_written_needs_the_layers_below_at_every_step(rng: torch.Generator) -> None:
    layers, x = small_stack(index_keys="as_written"), inputs(rng, 1, 12)
    layers[1](x[:, :10], 0)
    with pytest.raises(CacheError, match="against the index keys of layer 3, which must stand at 10"):
        layers[1](x[:, 10:11], 10)


def test_an_interrupted_step_ends_its_rows(rng: torch.Generator) -> None:
    layers, x = small_stack(), inputs(rng, 3, 6)
    wanted = run(small_stack(), x[:2], [6])
    run(layers, x, [5])
    weight, layers[1].wo_b.weight = layers[1].wo_b.weight, torch.nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(Exception):  # noqa: B017 (whatever a broken weight raises)
        layers[1](x[:2, 5:], 5)
    layers[1].wo_b.weight = weight
    with pytest.raises(CacheError, match="layer 1 hands down, which has not run"):
        layers[2](x[:2, 5:], 5)
    with pytest.raises(CacheError, match="layer 1, row 0: start_pos is 5, but the next position is 0"):
        layers[1](x[:2, 5:], 5)
    assert layers[1].cache.lengths == [0, 0, 5]
    assert torch.equal(run(layers, x[:2], [5, 1]), wanted)


def test_no_room_left(rng: torch.Generator) -> None:
    layer = small_stack(1)[0]
    layer(inputs(rng, 3, 64), 0)
    with pytest.raises(CacheFull, match="layer 0 would hold 65 positions of 64: raise max_seq_len"):
        layer(inputs(rng, 3, 1), 64)
    with pytest.raises(CacheFull, match="max_seq_len"):
        layer(inputs(rng, 1, 65), 0)


@pytest.mark.parametrize(
    ("x", "start", "message"),
    [
        (torch.zeros(4, 1, 64).bfloat16(), 0, "1 to 3 rows, got 4: raise max_batch_size"),
        (torch.zeros(0, 1, 64).bfloat16(), 0, "1 to 3 rows"),
        (torch.zeros(1, 0, 64).bfloat16(), 0, "dim 64"),
        (torch.zeros(1, 1, 65).bfloat16(), 0, "dim 64"),
        (torch.zeros(1, 1, 64), 0, "torch.bfloat16"),
        (torch.zeros(1, 1, 64).bfloat16(), -1, "start_pos must be 0 or more"),
    ],
)
def test_inputs_that_do_not_fit(x: Tensor, start: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        small_stack(1)[0](x, start)


def test_stacks_that_cannot_be_told_apart() -> None:
    args = small_args()
    first = [Attention(layer, args) for layer in (0, 1)]
    second = [Attention(0, args)]
    third = Attention(1, args)
    with pytest.raises(InputError, match="layer 1 must come before layer 1 .* build in ascending order"):
        Attention(1, args)
    assert first[0].shared is first[1].shared is not second[0].shared is third.shared


def test_layers_that_do_not_belong_together() -> None:
    shared = Shared()
    Attention(0, small_args(), shared)
    with pytest.raises(InputError, match="layer 0 is in this stack already"):
        Attention(0, small_args(), shared)
    with pytest.raises(InputError, match="another configuration"):
        Attention(1, small_args(index_topk=1), shared)
    with pytest.raises(InputError, match="layer_id must lie in 0 to 5"):
        Attention(6, small_args())
