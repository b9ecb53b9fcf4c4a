"""`openv41 bench`: what is compared and counted. How fast anything is belongs in benchmarks/, not here."""

import json

import pytest
import torch

from openv41.bench import BENCHMARKS, attention, find, speculate, vision
from openv41.bench.layer import continued, fill, held_tensors, operations, twin, values, work
from openv41.bench.measure import measure, readers
from openv41.cli import main
from openv41.config import Config
from openv41.errors import InputError
from openv41.generate import loop
from openv41.model.attention import Attention
from openv41.ops import choose
from openv41.ops.cpu import CpuOps
from openv41.state import Step
from tests.drafts import DRAFTING
from tests.small import small_config, small_model

CONFIG, LAYER = Config.tiny(), 6  # a re-scorer; 16 picks, a window of 16
SHORT = ["bench", "attention", "--threads", "1", "--position", "40", "--prompt", "24", "--repeats", "1"]
TOKEN = {"token_ms", "read_ms", "read_gb_s", "token_over_read"}
PROMPT = {"prompt_ms", "prompt_gflop", "prompt_gflop_s", "product_gflop_s", "prompt_share"}
REFERENCE = {"token_reference_ms", "token_factor", "tail_ms", "tail_reference_ms", "tail_factor"}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(attention, "released_layer", lambda: (CONFIG, LAYER))


@torch.no_grad()
def layer_of(**options) -> Attention:
    layer = Attention(CONFIG, LAYER, choose("cpu", "cpu", **options))
    fill(layer)
    return layer


# The command


def test_alone_it_lists_the_benchmarks(capsys):
    assert main(["bench"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [b.name for b in BENCHMARKS]
    assert main(["bench", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == [b.name for b in BENCHMARKS]


def test_a_name_that_is_none_is_told_with_the_nearest():
    with pytest.raises(InputError, match="did you mean attention"):
        find("attentoin")


def test_json_has_the_machine_the_agreement_and_the_figures(tiny, capsys):
    assert main([*SHORT, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["machine"]["threads"] == 1
    assert told["settings"] == {
        "ops": "cpu", "weights": "cached", "position": 40, "prompt": 24, "repeats": 1, "reference": True,
        "only": "",
    }  # fmt: skip
    agreement = told["agreement"]
    assert agreement["passed"] and not agreement["failures"] and agreement["equal"] >= 0.99
    assert agreement["compared"] > 0
    assert told["figures"].keys() == TOKEN | PROMPT | REFERENCE
    assert told["figures"]["token_ms"]["timing"]["repeats"] == 4
    assert told["figures"]["token_over_read"]["aim"]
    assert "comparing" in err and "timing" in err


def test_text_shows_the_figures(tiny, capsys):
    assert main([*SHORT, "--skip-reference", "--weights", "stored"]) == 0
    out = capsys.readouterr().out
    assert "token over reading" in out and "share of that rate" in out and "torch" in out
    assert "over the reference" not in out


def test_the_reference_may_be_timed_itself(tiny, capsys):
    assert main([*SHORT, "--ops", "reference", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["figures"].keys() == TOKEN | PROMPT
    assert told["agreement"]["equal"] == told["agreement"]["equal_at_the_end"] == 1


@pytest.mark.parametrize("prompt", ["1", "4", "5"])
def test_short_prompts_are_compared_too(tiny, capsys, prompt):
    short = ["bench", "attention", "--prompt", prompt, "--position", "0", "--repeats", "1", "--skip-reference"]
    assert main([*short, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agreement"]["passed"]


class Louder(CpuOps):
    def linear(self, x, weight, scale):
        return (super().linear(x, weight, scale).float() * 1.02).to(x.dtype)


class Nearest(CpuOps):
    def pick(self, scores, visible, k):
        return super().pick(torch.arange(scores.shape[1]).to(scores.dtype).expand_as(scores), visible, k)


class Sinkless(CpuOps):
    def sparse_attention(self, q, near, near_rows, far, far_rows, sink, scale):
        return super().sparse_attention(q, near, near_rows, far, far_rows, sink - 50, scale)


class LateInLongPrompts(CpuOps):
    """Right for the few tokens that are compared by operation, wrong in a prompt."""

    def grouped_linear(self, x, weight, scale):
        y = super().grouped_linear(x, weight, scale)
        return y.roll(1, 0) if len(y) > 8 else y


@pytest.mark.parametrize("wrong", [Louder, Nearest, Sinkless, LateInLongPrompts])
def test_operations_that_differ_get_no_figure(tiny, monkeypatch, capsys, wrong):
    right = choose
    monkeypatch.setattr(attention, "choose", lambda *a, **o: wrong() if a[1] == "cpu" else right(*a, **o))
    assert main([*SHORT, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["figures"] == {} and told["agreement"]["failures"] and not told["agreement"]["passed"]
    assert main(SHORT) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "no figures" in out
    assert not {"ms", "GB/s", "GFLOP/s", "GFLOP"} & set(out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["attention", "--ops", "hopper"],
        ["attention", "--weights", "int3"],
        ["attention", "--ops", "reference", "--weights", "bf16"],
        ["attention", "--threads", "0"],
        ["attention", "--repeats", "0"],
        ["attention", "--repeats", "many"],
        ["attention", "--prompt", "-5"],
        ["attention", "--position", "-1"],
        ["attention", "--position", "1048576"],
        ["attention", "--prompt", "1048577"],
    ],
)
def test_bad_arguments_end_with_2(arguments, capsys):
    try:
        code = main(["bench", *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert not capsys.readouterr().out


# What is run


def test_the_layer_is_the_one_that_was_asked_for():
    config, number = attention.released_layer()
    assert (config, number) == (Config.released(), 24)
    layer = Attention(config, number, choose("cpu", "cpu"))
    assert sum(p.numel() for name, p in layer.named_parameters() if not name.endswith(".scale")) == 132_024_128


def test_operations_are_counted_by_the_rows_there_are():
    config, number = attention.released_layer()
    layer = Attention(config, number, choose("cpu", "cpu"))
    step = Step.pack([(0, 0, torch.zeros(1000))])
    picks = torch.arange(512).expand(1000, 512)
    picks = picks.masked_fill(picks > step.position.unsqueeze(1), -1)
    counted = operations(layer, step, picks, config)
    rows = sum(min(t, 128) + min(t, 512) for t in range(1, 1001))
    assert counted["attention"] == 2 * 2 * 64 * 512 * rows
    assert counted["index"] == 2 * 32 * 128 * sum(range(1, 1001))
    assert counted["projections"] == 2 * 1000 * (132_024_128 - 1280 - 512 - 64)  # less norms and sinks
    assert round(sum(counted.values()) / 1e9) == 334


@torch.no_grad()
def test_work_repeats_itself_to_the_bit():
    layer = layer_of(weights="cached")
    piece = work(layer, CONFIG, values("token", 1, CONFIG.dim), 40)
    (first, sight), (again, _) = piece(layer), piece(layer)
    assert torch.equal(first, again)
    assert (sight.picks >= 0).sum() == CONFIG.index_topk and first.isfinite().all() and first.abs().amax() > 0


@torch.no_grad()
@pytest.mark.parametrize("start", [5, 16, 30])
def test_the_last_rows_alone_are_those_of_the_whole_prompt(start):
    layer = layer_of()
    judge = twin(layer, CONFIG, choose("cpu", "reference"))
    x = values("prompt", 34, CONFIG.dim)
    whole, sight = work(judge, CONFIG, x, 0)(judge)
    y, seen = continued(judge, CONFIG, x, start)(judge)
    assert torch.equal(y, whole[start:]) and torch.equal(seen.picks, sight.picks[start:])


@torch.no_grad()
@pytest.mark.parametrize(("weights", "size"), [("stored", 1), ("bf16", 2), ("fp32", 4)])
def test_what_is_held_is_what_products_read(weights, size):
    layer = layer_of(weights=weights)
    held = list(held_tensors(layer))
    assert layer.wq_b.weight.numel() * size in [tensor.nbytes for tensor in held]
    kept = sum(tensor.nbytes for tensor in held)
    stored = sum(parameter.nbytes for parameter in layer.parameters())
    assert kept == stored if weights == "stored" else kept > stored
    if weights != "stored":
        values_of = layer.ops.values(layer.wq_b.weight, layer.wq_b.scale)
        assert any(tensor is values_of for tensor in held)
        assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in held)


# How it is measured


def test_calls_take_turns_and_warm_ups_do_not_count():
    called = []
    times = measure({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, repeats=3, warm_up=2)
    assert called == ["a", "b"] * 5
    assert times.keys() == {"a", "b"}
    for timing in times.values():
        assert timing.repeats == 3 and timing.fastest <= timing.median <= timing.slowest


def test_readers_read_every_byte(rng):
    tensors = [torch.randn(shape, generator=rng) for shape in ((8, 1024), (3, 7))]
    tensors += [torch.randint(256, (5,), generator=rng).to(torch.uint8)]  # no whole number of words
    read = readers(tensors)
    floats = [float(tensor.double().sum()) for tensor in tensors]
    assert [float(part.double().sum()) for part in read["float32 sums"]()] == pytest.approx(floats, abs=1e-2)
    assert [float(part.double().sum()) for part in read["float32 products"]()] == pytest.approx(floats, abs=1e-2)
    words = [tensors[0].view(torch.int64).sum(), tensors[1].view(torch.uint8).sum(), tensors[2].sum()]
    assert read["int64 sums"]() == words


# The vision tower


@pytest.fixture
def tiny_tower(monkeypatch):
    config = Config.tiny().replace(vision_max_n_token=40, vision_min_pixels=196)
    monkeypatch.setattr(vision, "released_tower", lambda: config)
    monkeypatch.setattr(vision, "IMAGES", ((60, 50), (20, 20), (90, 30)))
    monkeypatch.setattr("openv41.bench.measure.SIDE", 64)
    return config


def test_the_tower_is_compared_and_then_timed(tiny_tower, capsys):
    assert main(["bench", "vision", "--threads", "1", "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agreement"]["passed"] and told["agreement"]["equal"] >= 0.99
    assert told["figures"].keys() == {
        "packed_ms", "packed_gflop", "packed_gflop_s", "product_gflop_s", "padded_ms", "padded_factor", "alone_ms",
        "alone_factor",
    }  # fmt: skip
    assert told["figures"]["padded_factor"]["aim"] and "3 images, 45 patches" in told["subject"]


def test_a_wrong_tower_has_no_figures(tiny_tower, monkeypatch, capsys):
    right = CpuOps.full_attention
    monkeypatch.setattr(CpuOps, "full_attention", lambda *arguments: right(*arguments).roll(1, 0))
    assert main(["bench", "vision", "--threads", "1", "--repeats", "1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["figures"] and any("full_attention" in failure for failure in told["agreement"]["failures"])


@torch.no_grad()
def test_the_towers_operations_are_counted_one_by_one(tiny_tower):
    """Every product of the blocks, by the shapes that PyTorch sees."""
    from torch.utils.flop_counter import FlopCounterMode

    settings = vision.Settings(ops="cpu", weights="stored")
    bench = vision._Bench(settings, tiny_tower, choose("cpu", "cpu", weights="stored"), lambda _: None)
    # The library's fused attention is not counted; its plain one is.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        bench.tower(bench.patches, bench.grids)
    assert bench.operations([rows * columns for rows, columns in bench.grids]) == counter.get_total_flops()


# Speculation


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr(speculate, "BATCHES", (2,))
    monkeypatch.setattr(speculate, "CHANCES", (0.0, 1.0))
    monkeypatch.setattr(speculate, "NEW", 7)
    monkeypatch.setattr(speculate, "PROMPT", 5)
    model = small_model(small_config(**DRAFTING), choose("cpu", "reference", "plain"))
    monkeypatch.setattr(speculate, "small_model", lambda ops, weights: model)


def test_speculation_tells_ratios_by_batch_and_chance(short_runs, capsys):
    assert main(["bench", "speculate", "--threads", "1", "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agreement"]["passed"] and told["agreement"]["equal"] == 1
    names = ["own_5", "00_5", "10_5", "own_auto", "00_auto", "10_auto", "break_even"]
    assert list(told["figures"]) == [f"batch_2_{name}" for name in ("ms", *names)]
    assert "5.00 accepted of a draft" in told["figures"]["batch_2_10_5"]["note"]
    assert "0.00 accepted of a draft" in told["figures"]["batch_2_00_5"]["note"]


def test_the_small_model_under_operations_for_gpus_is_that_under_the_others():
    """Here on a CPU, where they run as well."""
    models = [speculate.small_model(ops, "cached" if ops == "fast" else None) for ops in ("fast", "reference")]
    assert [model.ops.name for model in models] == ["fast", "reference"]
    for ours, theirs in zip(*(model.named_parameters() for model in models), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8)), ours[0]
    requests = speculate.requests_of(models[0], 2, 3)
    assert [len(text) for text in speculate.decode(models[0], requests).texts] == [3, 3]


def test_operations_for_gpus_are_for_one_benchmark(capsys):
    assert main(["bench", "attention", "--ops", "fast"]) == 2
    assert "--ops fast goes with speculate, got attention" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "vision", "speculate"])
def test_weights_are_for_the_operations_that_hold_them(name, capsys):
    assert main(["bench", name, "--ops", "reference", "--weights", "fp32"]) == 2
    error = capsys.readouterr().err
    assert "--weights goes with --ops cpu and fast, got fp32 for reference" in error and error.count("\n") == 1


@pytest.mark.parametrize(("text", "words"), [("x", "a whole number, got 'x'"), ("0", "at least 1, got 0")])
def test_counts_are_whole_numbers_above_0(text, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "vision", "--repeats", text])
    assert f"argument --repeats: must be {words}" in capsys.readouterr().err


def test_speculation_that_changes_a_text_gets_no_figure(short_runs, monkeypatch, capsys):
    right = loop.verify

    def wrong(*arguments):
        return [[*ids[:-1], ids[-1] ^ 1] if len(ids) > 1 else ids for ids in right(*arguments)]

    monkeypatch.setattr(loop, "verify", wrong)
    assert main(["bench", "speculate", "--threads", "1", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["figures"] == {} and "parts from the plain text at new id" in told["agreement"]["failures"][0]


def test_where_two_batches_part():
    assert speculate.first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert speculate.first_difference([[1, 2, 3], [3, 4, 5]], [[1, 2, 9], [3, 9, 9]]) == (1, 1)
