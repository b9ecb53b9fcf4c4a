"""Panels: the released model's published figures, every component in both modes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from openv41.config import Config
from openv41.errors import ConfigError, InputError
from openv41.explain.components import COMPONENTS, layers_with
from openv41.explain.cost import MACHINES
from openv41.explain.ledger import tree
from openv41.explain.panel import Panel, Question, explain
from openv41.explain.whatif import changed, compare
from openv41.explain.words import evidence_of
from openv41.plan import Role, plan_layers
from openv41.state import Cache

ROOT = Path(__file__).resolve().parents[2]
COUNTS = json.loads((ROOT / "tests" / "golden" / "param_counts.json").read_text())
RELEASED, TINY = Config.released(), Config.tiny()
KEYS = {
    "component", "title", "layer", "role", "mode", "position", "tokens", "batch", "inputs", "outputs", "parameters",
    "state", "cost", "parts", "why", "evidence", "notes",
}  # fmt: skip


def shapes(values: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {value["name"]: value["shape"] for value in values}


def of(component: str, config: Config = RELEASED, **question: Any) -> dict[str, Any]:
    return explain(config, Question(component, **question)).to_dict()


def test_the_published_panel() -> None:
    panel = of("attention", layer=24, mode="decode", position=1000)
    assert panel["role"] == "re-scorer"
    assert shapes(panel["inputs"]) == {
        "x": [1, 1, 5120], "latents": [1, 1001, 512], "index keys": [1, 1001, 128], "candidates": [1, 1, 1001],
    }  # fmt: skip
    assert shapes(panel["outputs"]) == {"y": [1, 1, 5120], "picks": [1, 1, 512]}
    assert panel["parameters"] == {
        "rows": [
            {"name": "query compression", "parameters": 6_554_880},
            {"name": "query heads", "parameters": 41_943_040},
            {"name": "window keys and values", "parameters": 2_621_952},
            {"name": "indexer (re-scored)", "parameters": 5_406_720},
            {"name": "sink", "parameters": 64},
            {"name": "grouped output", "parameters": 75_497_472},
        ],
        "per_instance": 132_024_128,
        "instances": [24, 28, 32, 36],
        "total": 528_096_512,
    }
    ring, latents, keys = panel["state"]
    assert ring == {
        "name": "window", "kept_by": "layer 24", "values": 65_536, "bytes": 128 * 528, "reads": 128 * 528,
        "writes": 528, "slots": 128, "held": 128, "writes_slot": 104,
    }  # fmt: skip
    assert (latents["kept_by"], latents["bytes"], latents["reads"]) == ("layer 20", 1001 * 288, 512 * 288)
    assert (keys["kept_by"], keys["bytes"], keys["reads"], keys["writes"]) == ("layer 20", 1001 * 68, 1001 * 68, 0)


@pytest.mark.parametrize("position", [0, 127, 1000, 1_048_575])
def test_the_ring_is_as_large_at_any_position(position: int) -> None:
    ring = of("attention", layer=24, position=position)["state"][0]
    assert (ring["values"], ring["bytes"], ring["slots"]) == (65_536, 67_584, 128)
    assert ring["held"] == min(position + 1, 128) and ring["writes_slot"] == position % 128
    assert ring["reads"] == min(position + 1, 128) * 528


@pytest.mark.parametrize("position", [0, 5, 14, 15, 16, 17, 100])
def test_the_ring_with_slack(position: int) -> None:
    w, d = TINY.window_size, TINY.head_dim
    ring = of("attention", TINY, layer=0, position=position, slack=5)["state"][0]
    assert (ring["values"], ring["slots"]) == ((w + 5) * d, w + 5)
    assert ring["held"] == min(position + 1, w + 5) and ring["writes_slot"] == position % (w + 5)
    assert ring["reads"] == min(position + 1, w) * (d + d // 32)


@pytest.mark.parametrize("layer", COUNTS["attention_by_layer"])
def test_parameters_of_every_kind_of_attention(layer: str) -> None:
    published = dict(COUNTS["attention_by_layer"][layer])
    rows = {row["name"]: row["parameters"] for row in of("attention", layer=int(layer))["parameters"]["rows"]}
    words = {
        "query_compression": "query compression", "query_heads": "query heads", "window_kv": "window keys and values",
        "sink": "sink", "grouped_output": "grouped output",
    }  # fmt: skip
    assert sum(rows.values()) == published.pop("total")
    for name, count in published.items():
        found = words.get(name) or next((row for row in rows if row.startswith(name)), "")
        assert rows.get(found, 0) == count, name


def test_parameters_of_layers_stages_and_experts() -> None:
    for layer, count in COUNTS["layers_without_engram"].items():
        assert of("block", layer=int(layer))["parameters"]["per_instance"] == count
    for stage, count in COUNTS["mtp_stages"].items():
        assert of("draft-stage", layer=40 + int(stage))["parameters"]["per_instance"] == count
    routed = next(r for r in of("experts", layer=0)["parameters"]["rows"] if r["name"] == "routed experts")
    assert routed["parameters"] == 384 * COUNTS["expert"]["one_routed_expert"]


def test_the_tree_adds_up() -> None:
    def check(node: dict[str, Any]) -> None:
        inside = node["inside"]
        if inside and node["name"] not in ("indexer",):
            assert sum(one["parameters"] for one in inside) == node["parameters"], node["name"]
        for one in inside:
            check(one)

    whole = tree(RELEASED)
    check(whole)
    check(tree(TINY))
    assert whole["parameters"] == COUNTS["total"]["parameters"] == 763_205_315_794


CALLS: list[dict[str, Any]] = [
    {"mode": "decode", "position": 0},
    {"mode": "decode", "position": 37},
    {"mode": "decode", "position": 200, "batch": 3},
    {"mode": "decode", "position": 90, "tokens": 6, "slack": 5, "batch": 2},
    {"mode": "prefill", "position": 0, "tokens": 1},
    {"mode": "prefill", "position": 0, "tokens": 53},
    {"mode": "prefill", "position": 31, "tokens": 40, "batch": 2},
]


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize("config", [TINY, RELEASED], ids=["tiny", "released"])
def test_every_component_in_both_modes(name: str, config: Config) -> None:
    """For a layer of each role that has it: the panel is whole, and its numbers hang together."""
    component = COMPONENTS[name]
    rows = layers_with(config, component)
    calls = CALLS if config is TINY else CALLS[-1:] + CALLS[2:3]
    kinds = {(row.role, row.ratio, row.half == "draft"): row.layer for row in rows}
    layers = list(kinds.values()) if component.level in ("layer", "draft") else [None]
    for call in calls:
        for layer in layers:
            drafts = component.level == "draft" or (layer is not None and layer >= config.n_layers)
            if drafts and call["mode"] == "prefill":
                with pytest.raises(InputError, match="no prefill"):
                    of(name, config, layer=layer, **call)
                continue
            check(of(name, config, layer=layer, **call), component.level, call, drafts, config)


def check(panel: dict[str, Any], level: str, call: dict[str, Any], drafts: bool, config: Config) -> None:
    assert set(panel) - {"image"} == KEYS
    json.dumps(panel)
    batch = call.get("batch", 1)
    for value in (*panel["inputs"], *panel["outputs"]):
        assert set(value) == {"name", "shape", "axes", "dtype"}
        assert len(value["shape"]) == len(value["axes"]), value
        if value["axes"][:1] == ["batch"]:
            assert value["shape"][0] == batch, value
        if "position" in value["axes"] and not drafts and level != "picture":
            assert value["shape"][value["axes"].index("position")] == call.get("tokens", 1), value
    rows = panel["parameters"]["rows"]
    together = panel["parameters"]["per_instance"]
    assert sum(row["parameters"] for row in rows) == together
    assert panel["parameters"]["total"] == together * max(1, len(panel["parameters"]["instances"]))
    for one in panel["state"]:
        assert one["bytes"] >= 0 and one["reads"] >= 0 and one["writes"] >= 0
        once = panel["component"] != "model" and one["name"] in ("latents", "keys")
        assert not once or one["reads"] <= one["bytes"], one
    cost = panel["cost"]
    assert sum(n for key, n in cost["flops"].items() if key != "total") == cost["flops"]["total"]
    assert sum(n for key, n in cost["bytes"].items() if key != "total") == cost["bytes"]["total"]
    assert min(*cost["flops"].values(), *cost["bytes"].values()) >= 0
    if panel["component"] not in ("delimiters", "candidates"):
        assert panel["inputs"] and panel["outputs"], panel["component"]
        assert cost["bytes"]["total"] > 0 and cost["floor_us"] > 0
    assert panel["why"] and panel["evidence"] and panel["notes"]


def test_roles_take_and_give_what_their_name_says() -> None:
    given: dict[Role, tuple[set[str], set[str]]] = {
        Role.WINDOW: (set(), set()),
        Role.SOURCE: (set(), {"latents", "index keys", "picks"}),
        Role.CANDIDATE_SOURCE: (set(), {"latents", "index keys", "picks", "candidates"}),
        Role.RESCORER: ({"latents", "index keys", "candidates"}, {"picks"}),
        Role.READER: ({"latents", "picks"}, set()),
    }
    for config in (TINY, RELEASED):
        for row in plan_layers(config)[: config.n_layers]:
            panel = of("attention", config, layer=row.layer, position=100)
            takes, gives = given[row.role]
            assert set(shapes(panel["inputs"])) == {"x"} | takes, row.layer
            assert set(shapes(panel["outputs"])) == {"y"} | gives, row.layer


def test_evidence_can_be_looked_up() -> None:
    for config in (TINY, RELEASED):
        for component in COMPONENTS.values():
            for row in layers_with(config, component):
                for one in evidence_of(config, component.statements(config, row)):
                    assert one["source"], one
                    texts = [(ROOT / "src/openv41/config.py").read_text()]
                    for source in one["source"]:
                        text = (ROOT / source["file"]).read_text().splitlines()
                        first, last = source["lines"]
                        name = source["name"].rpartition(".")[2]
                        assert name in "\n".join(text[first - 1 : min(last, first + 3)]), source
                        texts.append("\n".join(text))
                    assert all(any(key in text for text in texts) for key in one["keys"])


@pytest.mark.parametrize(
    ("component", "question", "words"),
    [
        ("attenton", {}, "no component 'attenton'"),
        ("attention", {"layer": 43}, "layer must be 0 to 42"),
        ("attention", {"layer": -1}, "layer must be 0 to 42"),
        ("indexer", {"layer": 21}, "layer 21 .reader. has no indexer: layers with one are 2, 8, 14, 20, 24, 28, 32"),
        ("compressor", {"layer": 24}, "has no compressor: layers with one are 2, 8, 14, 20"),
        ("engram", {"layer": 0}, "has no engram: layers with one are 1, 14"),
        ("draft-stage", {"layer": 3}, "has no draft-stage: layers with one are 40, 41, 42"),
        ("attention", {"position": 1_048_576}, "must fit the context of 1048576 tokens"),
        ("attention", {"position": -1}, "position must be 0 or more"),
        ("attention", {"batch": 0}, "batch must be 1 or more"),
        ("attention", {"mode": "prefill", "tokens": 0}, "tokens must be 1 or more"),
        ("attention", {"mode": "prefill", "tokens": 1 << 20}, "a recorded call takes up to 262144 tokens"),
        ("model", {"mode": "prefill", "tokens": (1 << 20) + 1}, "must fit the context"),
        ("model", {"mode": "prefill", "tokens": 8192, "position": 5}, "starts at position 0, got 5"),
        ("vision", {"image": (0, 5)}, "at least 1 x 1 pixels"),
        ("vision", {"position": 1_048_576}, "must fit the context"),
        ("vision", {"batch": 100}, "takes up to 262144 patches"),
        ("attention", {"image": (5, 5)}, "goes with vision and aligner"),
        ("attention", {"slack": 10**11}, "slack must be at most the context"),
        ("attention", {"slack": 1 << 20, "batch": 1000}, "lower batch or slack"),
        ("attention", {"batch": 1 << 18}, "takes up to 8192 sequences"),
        ("head", {"layer": 3}, "head stands once, in no layer"),
        ("vision", {"layer": 99}, "vision stands once, in no layer"),
    ],
)
def test_what_there_is_not(component: str, question: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        explain(RELEASED, Question(component, **question))


def test_a_long_prompt_has_edges_and_state() -> None:
    """The panel of a prompt in chunks, against that of the same prompt in one call."""
    prompt: dict[str, Any] = {"mode": "prefill", "tokens": 300, "prefill": "full", "batch": 2}
    one, many = of("model", TINY, **prompt), of("model", TINY, chunk=64, **prompt)
    assert shapes(many["inputs"]) == shapes(one["inputs"]) == {"ids": [2, 300]}
    assert many["outputs"] == one["outputs"]
    for whole, chunks in zip(one["state"], many["state"], strict=True):
        assert chunks["bytes"] == whole["bytes"]
        if whole["name"] in ("latents", "keys"):
            assert chunks["writes"] == whole["writes"] == whole["bytes"]
    for name in ("reads", "writes"):
        whole = many["cost"]["bytes"][f"state_{'read' if name == 'reads' else 'written'}"]
        assert sum(state[name] for state in many["state"]) * 2 == whole > 0


@pytest.mark.parametrize("component", ["draft-stage", "block", "attention", "sparse-attention"])
def test_a_draft_stage_reads_its_ring(component: str) -> None:
    (ring,) = of(component, TINY, layer=TINY.n_layers + 1, position=5, batch=2)["state"]
    assert (ring["name"], ring["kept_by"]) == ("draft", "draft stage 1")
    assert ring["reads"] == 5 * (TINY.head_dim + TINY.head_dim // 32) and ring["writes"] == 0


def test_no_row_reads_no_weight() -> None:
    """Of a ratio-2 source, a token that completes no group makes no latent and no index key."""
    makes, waits = (of("indexer", layer=2, position=position)["cost"] for position in (99, 100))
    c = RELEASED
    key = c.head_dim * c.index_head_dim
    assert makes["flops"]["bf16"] - waits["flops"]["bf16"] == 2 * key
    assert makes["bytes"]["weights"] - waits["bytes"]["weights"] == 2 * (key + c.index_head_dim)
    parts = {part["component"]: part for part in of("model", TINY, mode="prefill", tokens=600, chunk=64)["parts"]}
    head = 4 * TINY.vocab_size * TINY.dim  # once, with the last chunk
    assert parts["head"]["bytes"]["weights"] == head + 2 * TINY.dim
    assert parts["head"]["bytes"]["activations"] < 4 * TINY.vocab_size + 4 * 64 * TINY.dim


def test_several_pictures() -> None:
    one, three = of("vision", TINY, image=(90, 90)), of("vision", TINY, image=(90, 90), batch=3)
    assert three["batch"] == 3 and three["inputs"][0]["shape"][0] == 3 * one["inputs"][0]["shape"][0]
    assert three["inputs"][0]["axes"] == ["patch", "colour", "pixel", "pixel"]
    assert three["cost"]["flops"]["total"] == 3 * one["cost"]["flops"]["total"]
    assert three["cost"]["bytes"]["weights"] == one["cost"]["bytes"]["weights"]


def test_sources_may_begin_at_the_first_layer() -> None:
    config = TINY.replace(
        compress_ratios=(2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layers=(0, 4), index_source_layers=(0, 4, 6)
    )
    only = TINY.replace(
        compress_ratios=(1,) * 8 + (0,) * 3, kv_source_layers=(0,), index_source_layers=(0, 6), candidate_source_layer=0
    )
    for one in (config, only):
        assert of("model", one, mode="prefill", tokens=50)["cost"]["flops"]["total"] > 0


def test_a_part_that_is_switched_off() -> None:
    with pytest.raises(InputError, match="has no vision"):
        explain(TINY.replace(vision_n_layers=0), Question("vision"))
    assert "vision" not in {node["name"] for node in tree(TINY.replace(vision_n_layers=0))["inside"]}


def test_what_if() -> None:
    question, machine = Question("attention", layer=24, position=100_000), MACHINES["h200"]
    panel = compare(RELEASED, ["index_topk=1024"], question, machine)
    assert panel.what_if is not None
    found = {one["what"]: (one["before"], one["after"]) for one in panel.what_if["differences"]}
    assert found["outputs picks shape"] == ("[1, 1, 512]", "[1, 1, 1024]")
    assert found["state latents reads"] == (512 * 288, 1024 * 288)
    before, after = found["cost flops bf16"]
    assert after - before == 4 * 64 * 512 * 512
    same = compare(RELEASED, ["index_topk=512"], question, machine)
    assert same.what_if == {"changes": {"index_topk": 512}, "differences": []}


@pytest.mark.parametrize("change", ["index_topk", "no_such_key=3", "=3", ""])
def test_what_if_of_nothing(change: str) -> None:
    with pytest.raises(InputError, match="KEY=VALUE"):
        changed(RELEASED, [change])


def test_what_if_is_checked_as_usual() -> None:
    with pytest.raises(ConfigError):
        changed(RELEASED, ["index_topk=100000"])
    with pytest.raises(ConfigError):
        changed(RELEASED, ["dim=wide"])
    config, values = changed(RELEASED, ["n_activated_experts=8", "engram_layer_ids=[1, 14]", "score_func=sigmoid"])
    assert config.n_activated_experts == 8 and config.score_func == "sigmoid" and values["engram_layer_ids"] == (1, 14)


def test_state_of_the_whole_model() -> None:
    panel = of("model", position=1_048_575)
    kinds = {one["name"]: one for one in panel["state"]}
    assert kinds["latents"]["bytes"] + kinds["keys"]["bytes"] == 933_232_640
    assert sum(one["bytes_per_token"] for one in panel["state"]) == 890
    assert kinds["window"]["bytes"] == 2_703_360 and kinds["draft"]["bytes"] == 202_752


@pytest.mark.parametrize("config", [TINY, RELEASED], ids=["tiny", "released"])
@pytest.mark.parametrize("slack", [0, 3])
def test_state_is_what_a_cache_of_one_sequence_takes(config: Config, slack: int) -> None:
    """Whose pages are filled by the call, but for the page that is more than its tokens need."""
    page = Cache(config, 1, 1, device="meta").pages.tokens
    cache = Cache(config, 1, 3 * page, slack, device="meta", store="packed", draft=True)
    assert cache.pages.count == 4
    taken = {kind: count for kind, count in cache.nbytes().items() if count and kind != "pages"}
    told = {one["name"]: one["bytes"] for one in of("model", config, position=3 * page - 1, slack=slack)["state"]}
    assert told == {kind: count * 3 // 4 if kind in ("latents", "keys") else count for kind, count in taken.items()}


def test_a_panel_is_a_value() -> None:
    assert isinstance(explain(TINY, Question("embedding")), Panel)
