"""The table of names against the published one."""

import json
import re
from pathlib import Path

import pytest

from openv41.config import Config
from openv41.weights.names import Place, Spec, place, published_tensors, shard_of

DATA = Path(__file__).parent.parent / "data"
PUBLISHED = json.loads((DATA / "checkpoint_tensors.json").read_text())


@pytest.fixture(scope="module")
def released() -> dict[str, Spec]:
    return published_tensors(Config.released())


def test_released_totals(released):
    assert len(released) == PUBLISHED["tensors"] == 96_085
    assert sum(spec.nbytes for spec in released.values()) == PUBLISHED["bytes"] == 510_286_023_000


def test_released_rows(released):
    """Every published row, and nothing that is in no row."""
    by_pattern: dict[tuple[str, str], list[str]] = {}
    for name in released:
        by_pattern.setdefault(pattern_of(name), []).append(name)
    for row in PUBLISHED["rows"]:
        names = by_pattern.pop(re.sub(r"\{[ie]\}", "*", re.sub(r"layers\.\d+", "layers.*", row["pattern"])), [])
        if "engram.embed" in row["pattern"]:  # the two tables differ in length and have a row each
            rest = [name for name in names if not name.startswith(row["pattern"])]
            names = [name for name in names if name == row["pattern"]]
            if rest:
                by_pattern[pattern_of(rest[0])] = rest
        assert len(names) == row["count"], row["pattern"]
        assert {released[name] for name in names} == {Spec(tuple(row["shape"]), row["dtype"])}, row["pattern"]
        if row["layers"] and row["pattern"].startswith(("layers", "mtp")):
            assert sorted({int(name.split(".")[1]) for name in names}) == row["layers"], row["pattern"]
    assert not by_pattern


def pattern_of(name: str) -> str:
    return re.sub(r"(layers|mtp|blocks|experts)\.\d+", r"\1.*", name)


def test_released_shards(released):
    files = shard_of(Config.released())
    assert list(files) == list(released)
    assert list(dict.fromkeys(files.values())) == [f"model-{n:05d}-of-00048.safetensors" for n in range(1, 49)]
    held: dict[str, set[str]] = {}
    for name, file in files.items():
        held.setdefault(file[6:11], set()).add(name)
    assert len(held["00001"]) == 263 and all(name.startswith(("vision.", "aligner.")) for name in held["00001"])
    assert held["00002"] == {"embed.weight", "image_start", "image_newline", "image_end"}
    assert len(held["00003"]) == 2334 and len(held["00005"]) == 2342
    assert not any("engram" in name for name in held["00004"])
    assert held["00043"] == {"head.weight", "norm.weight"}
    assert [len(held[f"000{n}"]) for n in (44, 45, 46, 47, 48)] == [801, 798, 802, 6, 6]


def test_bf16_has_no_scales_but_those_of_experts_and_tables():
    config = Config.tiny().replace(dtype="bf16")
    specs = published_tensors(config)
    scales = [name for name in specs if name.endswith(".scale")]
    assert scales and all(".ffn.experts." in name or ".engram.embed." in name for name in scales)
    assert specs["layers.0.attn.wq_a.weight"] == Spec((64, 128), "BF16")
    plain = published_tensors(config.replace(expert_dtype=None))
    assert plain["layers.0.ffn.experts.3.w2.weight"] == Spec((128, 64), "BF16")
    assert not any(name.endswith(".scale") and ".experts." in name for name in plain)


def test_experts_without_a_type_are_stored_like_the_rest():
    specs = published_tensors(Config.tiny().replace(expert_dtype=None))
    assert specs["layers.0.ffn.experts.3.w2.weight"] == Spec((128, 64), "F8_E4M3")
    assert specs["layers.0.ffn.experts.3.w2.scale"] == Spec((4, 2), "F8_E8M0")


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({"vision_n_layers": 0}, ("vision.", "aligner.", "image_")),
        ({"n_mtp_layers": 0, "compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1)}, ("mtp.",)),
        ({"engram_layer_ids": (), "engram_num_embeddings": ()}, ("engram",)),
        ({"n_shared_experts": 0}, ("shared_experts",)),
    ],
)
def test_a_part_that_is_off_has_no_tensors(changes, gone):
    whole = published_tensors(Config.tiny())
    config = Config.tiny().replace(**changes)
    part = published_tensors(config)
    assert all(any(piece in name for name in whole) for piece in gone)
    assert not any(piece in name for name in part for piece in gone)
    assert ("layers.0.ffn.gate.bias_vl" in part) == bool(config.vision_n_layers)
    assert list(shard_of(config)) == list(part)


def test_places():
    assert place("layers.3.ffn.experts.7.w1.weight") == Place("layers.3.ffn.experts.w1.weight", 7)
    assert place("mtp.2.ffn.experts.127.w3.scale") == Place("mtp.2.ffn.experts.w3.scale", 127)
    assert place("layers.3.hc_attn_fn") == Place("layers.3.hc_attn.fn")
    assert place("mtp.0.hc_ffn_scale") == Place("mtp.0.hc_ffn.scale")
    for same in (
        "layers.2.attn.compressor.wkv.weight",
        "layers.1.engram.embed.weight",
        "image_start",
        "aligner.w1.bias",
    ):
        assert place(same) == Place(same)


def test_no_two_tensors_share_a_place(released):
    places = [place(name) for name in released if "layers.1" in name or not name.startswith("layers")]
    assert len(set(places)) == len(places) > 20_000
    stacked = {where.parameter for where in places if where.index is not None}
    assert not stacked & {where.parameter for where in places if where.index is None}
