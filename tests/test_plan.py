"""The table of layers: against the released roles, and against the definitions in the reader's words."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from openv41.config import Config
from openv41.plan import LayerPlan, Role, format_plan, last_published, plan_layers, plan_rows, plan_table

DATA = Path(__file__).parent / "data"
RELEASED: list[dict[str, Any]] = json.loads((DATA / "layer_roles.json").read_text())
GOLDEN: dict[str, dict[str, Any]] = json.loads((DATA / "golden_configs.json").read_text())
MODELS = {"released": Config.released(), "tiny": Config.tiny()} | {
    name: Config.from_dict(values) for name, values in GOLDEN.items()
}
MODES = {
    Role.WINDOW: "window",
    Role.SOURCE: "full",
    Role.CANDIDATE_SOURCE: "full",
    Role.RESCORER: "reindex",
    Role.READER: "reuse",
}


def sources(plan: tuple[LayerPlan, ...]) -> list[LayerPlan]:
    return [row for row in plan if row.role in (Role.SOURCE, Role.CANDIDATE_SOURCE)]


class TestReleased:
    def test_every_row_is_there(self) -> None:
        assert len(plan_layers(Config.released())) == len(RELEASED) == 43

    @pytest.mark.parametrize("row", RELEASED, ids=lambda row: f"layer{row['layer']}")
    def test_row(self, row: dict[str, Any]) -> None:
        plan = plan_layers(Config.released())[row["layer"]]
        figures = {
            "layer": plan.layer,
            "checkpoint": plan.name,
            "half": plan.half,
            "compress_ratio": plan.ratio,
            "mode": MODES[plan.role],
            "kv_source": plan.latents_from,
            "index_source": plan.picks_from,
            "publishes_candidates": plan.publishes_candidates,
            "uses_candidates": plan.within == 20,
            "engram": plan.engram,
            "rope_theta": plan.theta,
            "yarn": plan.yarn,
            "dspark_target": plan.tapped,
            "experts": plan.experts,
            "experts_per_token": plan.experts_per_token,
        }
        backbone = {"checkpoint": f"layers.{row['layer']}", "experts": 384, "experts_per_token": 6}
        draft = {"dspark_target": False}
        stated = {key: value for key, value in row.items() if key != "tensors"}
        assert figures == (draft if row["half"] == "draft" else backbone) | stated

    def test_counts_of_roles(self) -> None:
        roles = [row.role for row in plan_layers(Config.released())]
        assert {role: roles.count(role) for role in Role} == {
            Role.WINDOW: 5,
            Role.SOURCE: 3,
            Role.CANDIDATE_SOURCE: 1,
            Role.RESCORER: 4,
            Role.READER: 30,
        }


class TestAnyModel:
    @pytest.mark.parametrize("name", MODELS)
    def test_rows_follow_the_lists(self, name: str) -> None:
        config = MODELS[name]
        plan = plan_layers(config)
        assert [row.layer for row in plan] == list(range(config.n_layers + config.n_mtp_layers))
        assert [row.ratio for row in plan] == list(config.compress_ratios)
        assert [row.layer for row in sources(plan)] == list(config.kv_source_layers)
        assert [row.layer for row in plan if row.picks_from == row.layer] == list(config.index_source_layers)
        assert [row.layer for row in plan if row.publishes_candidates] == [
            layer for layer in [config.candidate_source_layer] if layer >= 0
        ]
        assert [row.layer for row in plan if row.half == "draft"] == list(range(config.n_layers, len(plan)))

    @pytest.mark.parametrize("name", MODELS)
    def test_rows_agree_with_one_another(self, name: str) -> None:
        plan = plan_layers(MODELS[name])
        for row in plan:
            if row.role is Role.WINDOW:
                assert (row.ratio, row.latents_from, row.picks_from, row.within) == (0, None, None, None)
                continue
            assert row.latents_from is not None and row.picks_from is not None
            maker, picker = plan[row.latents_from], plan[row.picks_from]
            assert maker in sources(plan) and maker.ratio == row.ratio
            assert row.latents_from <= row.picks_from <= row.layer
            assert picker.latents_from == row.latents_from, "picks number the latents of another layer"
            assert row.within is None or (row.role is Role.RESCORER and row.within == row.latents_from)

    def test_rescorers_without_candidates_are_free(self) -> None:
        config = Config.released().replace(candidate_source_layer=-1)
        plan = plan_layers(config)
        assert plan[20].role is Role.SOURCE and plan[24].role is Role.RESCORER
        assert [row.within for row in plan] == [None] * 43

    def test_without_latents_all_layers_are_the_decoder(self) -> None:
        assert [row.half for row in plan_layers(MODELS["block/block_text"])] == ["decoder"]

    def test_parts_that_are_off(self) -> None:
        config = Config.released()
        assert not any(row.yarn for row in plan_layers(config.replace(original_seq_len=0)))
        undrafted = config.replace(n_mtp_layers=0, compress_ratios=config.compress_ratios[:40])
        assert not any(row.tapped or row.half == "draft" for row in plan_layers(undrafted))
        same = plan_layers(config.replace(dspark_n_routed_experts=0, dspark_n_activated_experts=0))
        assert {(row.experts, row.experts_per_token) for row in same} == {(384, 6)}

    def test_rows_are_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            plan_layers(Config.tiny())[0].ratio = 1  # type: ignore[misc]


class TestLastPublished:
    @pytest.mark.parametrize("name", MODELS)
    def test_against_playing_the_steps(self, name: str) -> None:
        """One slot, written by every source that completes a group, read by every layer that picks."""
        plan = plan_layers(MODELS[name])
        slot: int | None = None
        for position in range(9):
            for row in plan:
                if row in sources(plan) and (position + 1) % row.ratio == 0:
                    slot = row.layer
                assert last_published(plan, row.layer, position) == slot, (row.layer, position)

    def test_ratio_two_reads_a_stranger(self) -> None:
        plan = plan_layers(Config.released())
        assert last_published(plan, 2, 0) is None
        assert [last_published(plan, layer, 10) for layer in (2, 8, 14, 20, 24)] == [20, 20, 20, 20, 20]
        assert [last_published(plan, layer, 11) for layer in (2, 8, 14, 20, 24)] == [2, 8, 14, 20, 20]

    def test_sources_of_several_ratios(self) -> None:
        config = Config.tiny().replace(
            compress_ratios=(0, 3, 3, 2, 2, 2, 0, 0, 0, 0, 0), kv_source_layers=(1, 3), index_source_layers=(1, 3),
            candidate_source_layer=3,
        )  # fmt: skip
        plan = plan_layers(config)
        assert [last_published(plan, 1, position) for position in range(7)] == [None, None, 1, 1, 3, 1, 3]


class TestPrinted:
    def test_json_rows(self) -> None:
        rows = json.loads(json.dumps(plan_rows(Config.released())))
        assert len(rows) == 43
        some = {"layer": 24, "name": "layers.24", "role": "re-scorer", "latents_from": 20, "within": 20}
        assert some.items() <= rows[24].items()
        assert [row["layer"] for row in rows if row["publishes_candidates"]] == [20]

    def test_table(self) -> None:
        headings, *rows = plan_table(Config.released())
        assert len(rows) == 43 and {len(row) for row in rows} == {len(headings)}
        row = dict(zip(headings, rows[24], strict=True))
        assert row == {
            "layer": "24", "name": "layers.24", "half": "decoder", "role": "re-scorer", "ratio": "1", "latents": "20",
            "picks": "24", "within": "20", "memory": "-", "theta": "160000", "yarn": "yes", "tapped": "-",
            "experts": "384", "active": "6",
        }  # fmt: skip

    def test_text_is_aligned(self) -> None:
        text = format_plan(Config.tiny())
        first, *lines = text.splitlines()
        assert len(lines) == 11 and text == "\n".join(line.rstrip() for line in [first, *lines])
        assert [line.split()[0] for line in lines] == [str(layer) for layer in range(11)]
        for heading in ("name", "half", "role", "yarn", "tapped"):
            at = first.index(heading)
            assert all(line[at] != " " and line[at - 1] == " " for line in lines), heading
        for heading in ("ratio", "latents", "theta", "active"):
            end = first.index(heading) + len(heading)
            assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines), heading
