"""Costs: parts add up to the whole, stretches to single chunks, and machines are checked."""

import json
from collections import Counter
from pathlib import Path

import pytest

from openv41.config import Config
from openv41.errors import InputError
from openv41.explain.components import component_of
from openv41.explain.cost import FORMATS, MACHINES, Cost, Machine, add, machine_named, of_prompt, split
from openv41.explain.counting import distinct
from openv41.explain.panel import Question, explain
from openv41.explain.scene import Scene

RELEASED, TINY = Config.released(), Config.tiny()


@pytest.mark.parametrize("scene", [Scene(TINY, "decode", 90, 1, 2), Scene(TINY, "prefill", 10, 50)])
def test_parts_add_up(scene: Scene) -> None:
    root = scene.record()
    parts = split(root, component_of)
    together = sum(parts.values(), Cost())
    assert +together.flops == +root.flops
    state = {"state_read": 0, "state_written": 0}
    for one in root.state.values():
        state["state_read"] += one.read
        state["state_written"] += one.written
    assert {key: together.nbytes[key] for key in state} == state
    assert {key: together.nbytes[key] for key in root.read} == dict(root.read)
    nothing = parts.pop("other")
    assert not +nothing.flops and not +nothing.nbytes, "everything that costs belongs to a component"
    assert all(min(*cost.flops.values(), *cost.nbytes.values(), 0) >= 0 for cost in parts.values())


@pytest.mark.parametrize(("tokens", "chunk", "prefill"), [(1000, 64, "halo"), (669, 50, "full"), (640, 640, "halo")])
def test_a_prompt_costs_what_its_chunks_cost(tokens: int, chunk: int, prefill: str) -> None:
    """Stretches that are added up as one, against every chunk by itself."""
    counted: list[tuple[int, int]] = []
    parts = of_prompt(TINY, tokens, chunk, 1, prefill, component_of, lambda *done: counted.append(done))
    each: dict[str, Cost] = {}
    for start in range(0, tokens, chunk):
        scene = Scene(TINY, "prefill", start, min(chunk, tokens - start))
        add(each, split(scene.record(prefill, prompt=tokens), component_of))  # type: ignore[arg-type]
    assert parts.keys() == each.keys()
    for name, cost in each.items():
        assert +parts[name].flops == +cost.flops and +parts[name].nbytes == +cost.nbytes, name
    assert len(counted) <= -(-tokens // chunk)


def test_a_long_prompt_is_not_run_chunk_by_chunk() -> None:
    counted: list[tuple[int, int]] = []
    of_prompt(TINY, 8192, 64, 1, "full", component_of, lambda *done: counted.append(done))
    assert len(counted) < 64 and counted[-1][1] == 128


def test_half_the_layers_save_half() -> None:
    """The upper half runs the latest tokens alone."""
    flops = {
        prefill: explain(TINY, Question("model", mode="prefill", tokens=2048, prefill=prefill)).cost["flops"]["total"]
        for prefill in ("halo", "full")
    }
    assert 0.4 < flops["halo"] / flops["full"] < 0.75


def test_figures_of_the_released_decode() -> None:
    """A few that can be worked out by hand."""
    panel = explain(RELEASED, Question("attention", layer=24, position=131_071))
    c = RELEASED
    projections = 2 * (
        c.dim * c.q_lora_rank + c.q_lora_rank * c.n_heads * c.head_dim + c.dim * c.head_dim
        + c.q_lora_rank * c.index_n_heads * c.index_head_dim + c.o_groups * c.o_lora_rank * c.dim
    )  # fmt: skip
    assert panel.cost["flops"]["fp8"] == projections
    candidates = c.candidate_topk_blocks * c.candidate_block_size
    bf16 = (
        2 * c.n_heads * c.head_dim * c.o_lora_rank
        + 2 * c.dim * c.index_n_heads
        + 2 * c.index_n_heads * c.index_head_dim * candidates
        + 4 * c.n_heads * c.head_dim * (c.window_size + c.index_topk)
    )
    assert panel.cost["flops"]["bf16"] == bf16
    experts = explain(RELEASED, Question("experts", layer=3))
    assert experts.cost["flops"]["fp4_fp8"] == 2 * 6 * 3 * c.dim * c.moe_inter_dim
    head = explain(RELEASED, Question("head"))
    assert head.cost["flops"] == {"fp4_fp8": 0, "fp8": 0, "bf16": 0, "fp32": 2 * c.dim * c.vocab_size,
                                  "total": 2 * c.dim * c.vocab_size}  # fmt: skip


def test_experts_that_a_call_reads() -> None:
    assert distinct(384, 6, 1) == pytest.approx(6)
    assert distinct(384, 6, 10_000) == pytest.approx(384)
    assert 11.8 < distinct(384, 6, 2) < 12
    one = explain(RELEASED, Question("experts", layer=3)).cost["bytes"]["weights"]
    many = explain(RELEASED, Question("experts", layer=3, batch=64)).cost["bytes"]["weights"]
    assert 20 < many / one < 64


def test_floors() -> None:
    cost = Cost(Counter(fp8=1496 * 10**6 - 1), Counter(weights=43 * 10**5))
    told = cost.to_dict(MACHINES["h200"])
    assert told["floor_us"] == pytest.approx(1.0) and told["bound_by"] == "memory"
    assert cost.times(3).total_flops == 3 * cost.total_flops
    assert not +cost.less(cost).flops


def test_machines_say_where_their_figures_come_from() -> None:
    for machine in MACHINES.values():
        assert set(machine.rates) == set(FORMATS) and set(machine.sources) == {*FORMATS, "bandwidth"}
        assert machine.bandwidth > 0 and min(machine.rates.values()) > 0


def test_a_panel_says_where_the_figures_of_its_floor_come_from() -> None:
    for name, machine in MACHINES.items():
        notes = explain(RELEASED, Question("attention", layer=24, position=1000), name).notes
        told = [note for note in notes if note.startswith(name)]
        assert [note[note.index("(") + 1 : -1] for note in told] == [
            machine.sources[key] for key in ("bandwidth", "fp8", "bf16")
        ]
    unsourced = Machine("mine", 1e11, dict.fromkeys(FORMATS, 1e12), {})
    assert unsourced.figures(Cost(Counter(fp8=1))) == [
        "mine moves 0.1 TB/s (the machine file does not say from where)",
        "mine multiplies fp8 at 1 TFLOP/s (the machine file does not say from where)",
    ]


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    rates = {"fp4_fp8": 1e12, "fp8": 1e12, "bf16": 5e11, "fp32": 1e11}
    path.write_text(json.dumps({"bandwidth": 1e11, "rates": rates}))
    machine = machine_named(str(path))
    assert (machine.name, machine.bandwidth, machine.rates) == ("mine", 1e11, rates)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"bandwidth": 1}', '{"bandwidth": 0, "rates": {"fp4_fp8":1,"fp8":1,"bf16":1,"fp32":1}}',
        '{"bandwidth": 1, "rates": {"fp8": 1}}', '{"bandwidth": "1", "rates": {"fp4_fp8":1,"fp8":1,"bf16":1,"fp32":1}}',
        '{"bandwidth": 1, "rates": {"fp4_fp8":NaN,"fp8":1,"bf16":1,"fp32":1}}', "[" * 100_000,
        '{"bandwidth": 1, "rates": {"fp4_fp8":1,"fp8":1,"bf16":1,"fp32":1}, "sources": 5}', "\\udcff",
    ],
)  # fmt: skip
def test_a_file_that_describes_no_machine(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape") if text != "\\udcff" else b"\xff\xfe{")
    with pytest.raises(InputError, match="does not describe a machine"):
        machine_named(str(path))


def test_a_machine_that_there_is_not() -> None:
    with pytest.raises(InputError, match="no machine 'b200': take h200, h100, cpu"):
        machine_named("b200")
