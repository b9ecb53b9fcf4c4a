"""The configuration: two published files, one object; nothing missing, nothing unknown, nothing contradictory."""

import copy
import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from openv41.config import CONTEXT_WITHOUT_YARN, Config, SpecialIds, engram_primes
from openv41.errors import ConfigError, OpenV41Error

DATA = Path(__file__).parent / "data"
FLAT: dict[str, Any] = json.loads((DATA / "inference_config.json").read_text())
NESTED: dict[str, Any] = json.loads((DATA / "hf_config.json").read_text())
GOLDEN: dict[str, dict[str, Any]] = json.loads((DATA / "golden_configs.json").read_text())
SPECIAL = SpecialIds(bos=0, eos=1, pad=2)


def leaves(values: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield from leaves(value, (*prefix, key)) if isinstance(value, dict) else [(*prefix, key)]


def changed(values: dict[str, Any], key: tuple[str, ...], value: Any = None, remove: bool = False) -> dict[str, Any]:
    values = copy.deepcopy(values)
    place = values
    for section in key[:-1]:
        place = place[section]
    if remove:
        del place[key[-1]]
    else:
        place[key[-1]] = value
    return values


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Read a value, or a text, as a file."""

    def read(values: Any) -> Config:
        file = tmp_path / "config.json"
        file.write_text(values if isinstance(values, str) else json.dumps(values))
        return Config.from_json(file)

    return read


class TestPublishedFiles:
    def test_give_equal_objects(self) -> None:
        flat, nested = Config.from_json(DATA / "inference_config.json"), Config.from_json(str(DATA / "hf_config.json"))
        assert flat == nested == Config.released()
        assert hash(flat) == hash(nested)
        assert [type(value) for value in vars(flat).values()] == [type(value) for value in vars(nested).values()]

    def test_keys_are_the_fields(self) -> None:
        assert {field.name for field in fields(Config)} == set(FLAT)
        assert len(FLAT) == 64

    def test_written_out_again(self) -> None:
        assert Config.released().to_dict() == FLAT
        assert Config.released().to_hf(SPECIAL) == NESTED

    def test_special_ids(self) -> None:
        assert SpecialIds.from_json(DATA / "hf_config.json") == SPECIAL
        with pytest.raises(ConfigError, match="bos_token_id, eos_token_id, pad_token_id .* flat form has none"):
            SpecialIds.from_json(DATA / "inference_config.json")

    @pytest.mark.parametrize("key", list(leaves(FLAT)), ids=".".join)
    def test_flat_file_needs_every_key(self, key: tuple[str, ...], read: Any) -> None:
        with pytest.raises(ConfigError, match=rf": {key[0]} must be stated.*add it"):
            read(changed(FLAT, key, remove=True))

    @pytest.mark.parametrize("key", list(leaves(NESTED)), ids=".".join)
    def test_nested_file_needs_every_key(self, key: tuple[str, ...], read: Any) -> None:
        with pytest.raises(ConfigError, match=rf": {'.'.join(key)} must be stated.*add it"):
            read(changed(NESTED, key, remove=True))

    @pytest.mark.parametrize(
        "section",
        [("text_config",), ("text_config", "rope_scaling"), ("vision_config",), ("quantization_config",)],
        ids=".".join,
    )
    def test_nested_file_needs_every_section(self, section: tuple[str, ...], read: Any) -> None:
        name = ".".join(section)
        with pytest.raises(ConfigError, match=rf": {name}\.\w+.* must be stated"):
            read(changed(NESTED, section, remove=True))
        with pytest.raises(ConfigError, match=rf": {name} must be an object"):
            read(changed(NESTED, section, [1]))

    @pytest.mark.parametrize(
        ("values", "key"),
        [(FLAT, "gate_temp"), (NESTED, "gate_temp"), (NESTED, "text_config.gate_temp"), (FLAT, "hidden_size")],
    )
    def test_unknown_key(self, values: dict[str, Any], key: str, read: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{key} must be a key of the published file, but is unknown; remove it"):
            read(changed(values, tuple(key.split(".")), 1))

    def test_misspelt_key_is_guessed(self, read: Any) -> None:
        with pytest.raises(ConfigError, match="index_topks must be a key.*did you mean index_topk?"):
            read({**FLAT, "index_topks": 512})

    @pytest.mark.parametrize("key", list(leaves(NESTED)), ids=".".join)
    def test_nested_file_checks_every_value(self, key: tuple[str, ...], read: Any) -> None:
        """No published key takes an object, and the error names the key as it stands in this file."""
        with pytest.raises(ConfigError, match=".".join(key)):
            read(changed(NESTED, key, {}))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("model_type", "deepseek_v4"),
            ("dtype", "float16"),
            ("text_config.hidden_act", "gelu"),
            ("text_config.attention_bias", True),
            ("text_config.attention_bias", 0),
            ("text_config.attention_dropout", 0.1),
            ("text_config.tie_word_embeddings", True),
            ("text_config.num_key_value_heads", 8),
            ("text_config.num_key_value_heads", True),
            ("text_config.rope_scaling.rope_type", "linear"),
            ("text_config.topk_method", "greedy"),
            ("text_config.norm_topk_prob", False),
            ("text_config.norm_topk_prob", 1),
            ("text_config.use_cache", 1),
            ("text_config.initializer_range", "0.02"),
            ("text_config.max_position_embeddings", 65536),
            ("text_config.max_position_embeddings", 1048576.0),
            ("quantization_config.quant_method", "bf16"),
            ("quantization_config.activation_scheme", "static"),
            ("quantization_config.weight_block_size", [128, 128]),
            ("quantization_config.scale_fmt", "float"),
            ("vision_config.model_type", "siglip"),
            ("bos_token_id", True),
            ("eos_token_id", 129280),
            ("pad_token_id", -1),
        ],
    )
    def test_nested_extras(self, key: str, value: Any, read: Any) -> None:
        with pytest.raises(ConfigError, match=f": {key} must .*, got .*; "):
            read(changed(NESTED, tuple(key.split(".")), value))

    def test_nested_error_gives_both_names(self, read: Any) -> None:
        with pytest.raises(ConfigError, match=r"dim must .*text_config\.hidden_size"):
            read(changed(NESTED, ("text_config", "hidden_size"), 5121))

    @pytest.mark.parametrize("values", [FLAT, NESTED], ids=["flat", "nested"])
    def test_a_file_with_vision_names_an_image_token(self, values: dict[str, Any], read: Any) -> None:
        with pytest.raises(ConfigError, match="image_token_id must be below vocab_size"):
            read(changed(values, ("image_token_id",), 129280))


class TestUnreadableFiles:
    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "must be JSON"),
            ("{", "must be JSON"),
            ("[" * 100_000, "must be JSON"),
            ("[]", "must hold one JSON object"),
            ("null", "must hold one JSON object"),
            ('{"dim": 1, "dim": 1}', "dim must stand once"),
            ('{"text_config": {"head_dim": 1, "head_dim": 2}}', "head_dim must stand once"),
            ('{"text_config.head_dim": 1, "text_config": {"head_dim": 2}}', "head_dim must stand once"),
            ('{"norm_eps": NaN}', "finite, got NaN"),
            ('{"norm_eps": -Infinity}', "finite, got -Infinity"),
        ],
    )
    def test_text(self, text: str, complaint: str, read: Any) -> None:
        with pytest.raises(ConfigError, match=complaint):
            read(text)

    def test_too_large_a_number(self, read: Any) -> None:
        with pytest.raises(ConfigError, match="norm_eps must be a finite number"):
            read(json.dumps(FLAT).replace("1e-20", "1e999"))

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="absent.json: the file cannot be read"):
            Config.from_json(tmp_path / "absent.json")
        with pytest.raises(ConfigError, match="cannot be read"):
            Config.from_json(tmp_path)

    def test_no_text(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="must be JSON in UTF-8"):
            Config.from_json(file)


class TestTypes:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dim", "5120"),
            ("dim", 5120.0),
            ("dim", True),
            ("dim", [5120]),
            ("rope_theta", "10000"),
            ("rope_theta", True),
            ("rope_theta", 10**400),
            ("norm_eps", float("nan")),
            ("norm_eps", float("inf")),
            ("score_func", 1),
            ("expert_dtype", 4),
            ("vision_max_wh_ratio", "none"),
            ("vision_max_wh_ratio", False),
            ("kv_source_layers", 2),
            ("kv_source_layers", "2"),
            ("kv_source_layers", [2, 8, 14, 20.0]),
            ("kv_source_layers", [2, 8, 14, True]),
        ],
    )
    def test_wrong(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"^{key} must be .*, got .*; "):
            Config.from_dict({**FLAT, key: value})

    def test_nulls_where_published(self) -> None:
        config = Config.released().replace(expert_dtype=None, vision_max_wh_ratio=3)
        assert config.expert_dtype is None and config.vision_max_wh_ratio == 3.0

    def test_whole_numbers_may_be_written_with_a_point(self) -> None:
        assert Config.from_dict({**FLAT, "rope_theta": 10000.0, "swiglu_limit": 10}) == Config.released()

    def test_errors_are_of_the_tree(self) -> None:
        assert issubclass(ConfigError, OpenV41Error) and issubclass(ConfigError, ValueError)


RELEASED_RULES = [
    # ranges
    ("dim", 0, "at least 1"),
    ("vocab_size", -1, "lie in 0"),
    ("vocab_size", 2**31, "lie in 0"),
    ("hc_mult", 0, "at least 1"),
    ("n_activated_experts", 0, "at least 1"),
    ("candidate_source_layer", -2, "lie in -1"),
    ("kv_source_layers", [-1, 8, 14, 20], "lie in 0"),
    ("norm_eps", 0, "above 0"),
    ("hc_eps", -1e-6, "above 0"),
    ("route_scale", 0.0, "above 0"),
    ("swiglu_limit", -1, "at least 0"),
    ("score_func", "relu", "one of"),
    ("dtype", "fp16", "one of"),
    ("expert_dtype", "fp8", "one of"),
    # widths
    ("o_groups", 7, r"divide n_heads \(64\)"),
    ("head_dim", 520, "multiple of 32.*try 544"),
    ("index_head_dim", 100, "multiple of 32"),
    ("engram_head_dim", 250, "multiple of 32"),
    ("dim", 5121, "multiple of 32"),
    ("moe_inter_dim", 2300, "multiple of 32"),
    ("q_lora_rank", 1281, "multiple of 32"),
    ("o_lora_rank", 1, "multiple of 32 when multiplied by o_groups"),
    # rotary
    ("rope_head_dim", 63, "be even"),
    ("rope_head_dim", 514, r"at most head_dim \(512\)"),
    ("rope_head_dim", 130, r"at most index_head_dim \(128\)"),
    ("rope_theta", 1, "above 1"),
    ("compress_rope_theta", 0, "above 1"),
    ("vision_rope_theta", 1.0, "above 1"),
    ("rope_factor", 0.5, "at least 1"),
    ("rope_factor", 1.00001, "whole number of tokens"),
    ("rope_factor", 65536, "keep the context within"),
    ("beta_slow", 0, "above 0"),
    ("beta_fast", 1, r"above beta_slow \(1.0\)"),
    # layers and their sources
    ("compress_ratios", [0] * 42, r"one entry per layer \(n_layers 40 \+ n_mtp_layers 3 = 43\), got 42"),
    ("compress_ratios", FLAT["compress_ratios"][:-1] + [1], "be 0 for draft stages"),
    ("kv_source_layers", [8, 2, 14, 20], "ascend"),
    ("kv_source_layers", [2, 8, 8, 20], "ascend"),
    ("kv_source_layers", [2, 8, 14, 40], "layers of the backbone"),
    ("kv_source_layers", [1, 8, 14, 20], "ratio is above 0"),
    ("kv_source_layers", [8, 14, 20], "at or before index source 2"),
    ("index_source_layers", [2, 14, 8, 20], "ascend"),
    ("index_source_layers", [2, 8, 14, 20, 20], "ascend"),
    ("index_source_layers", [2, 8, 14, 20, 43], "layers of the backbone"),
    ("index_source_layers", [0, 2, 8, 14, 20], "ratio is above 0"),
    ("index_source_layers", [2, 8, 20], "hold every layer of kv_source_layers.*add 14"),
    # picks and candidates
    ("index_topk", 0, "at least 1"),
    ("index_n_heads", 0, "at least 1"),
    ("candidate_topk_blocks", 0, "at least 1"),
    ("candidate_block_size", 0, "at least 1"),
    ("candidate_source_layer", 24, "-1 or the last KV source"),
    ("candidate_source_layer", 14, "-1 or the last KV source"),
    # experts
    ("n_shared_experts", 2, "be 0 or 1"),
    ("n_activated_experts", 385, r"at most n_routed_experts \(384\)"),
    # draft
    ("dspark_block_size", 0, "at least 1"),
    ("dspark_markov_rank", 0, "at least 1"),
    ("dspark_noise_token_id", 129280, "below vocab_size"),
    ("dspark_target_layer_ids", [38, 39, 40], "layers of the backbone"),
    ("dspark_target_layer_ids", [39, 38], "ascend"),
    ("dspark_target_layer_ids", [], "at least one layer"),
    ("dspark_n_activated_experts", 129, r"at most dspark_n_routed_experts \(128\)"),
    # n-gram memory
    ("engram_layer_ids", [14, 1], "ascend"),
    ("engram_layer_ids", [1, 40], "layers of the backbone"),
    ("engram_n_heads", 0, "at least 1"),
    ("engram_head_dim", 0, "at least 1"),
    ("engram_compressed_vocab_size", 0, "at least 1"),
    ("engram_compressed_vocab_size", 129281, "at most vocab_size"),
    ("engram_max_ngram_size", 1, "at least 2"),
    ("engram_pad_id", 129280, "below vocab_size"),
    ("engram_num_embeddings", [384006168], "one entry per layer"),
    ("engram_num_embeddings", [384006168, 384016683], r"sums of each layer's primes \(384006168, 384016682\)"),
    ("engram_num_embeddings", [384006168, 1], "at least .*3 sizes x 8 heads"),
    # vision
    ("vision_n_heads", 0, "at least 1"),
    ("vision_patch_size", 0, "at least 1"),
    ("vision_dim", 1000, r"multiple of vision_n_heads \(16\)"),
    ("vision_dim", 16 * 6, "multiple of 4"),
    ("vision_max_n_token", 3, "at least 4"),
    ("vision_max_wh_ratio", 0.5, "null or at least 1"),
]


class TestRules:
    @pytest.mark.parametrize(("key", "value", "rule"), RELEASED_RULES)
    def test_one_field_of_the_released_model(self, key: str, value: Any, rule: str) -> None:
        with pytest.raises(ConfigError, match=rf"^{key} must .*{rule}") as caught:
            Config.released().replace(**{key: value})
        assert "; " in str(caught.value), "no way out"

    def test_a_layer_reads_latents_of_its_own_ratio(self) -> None:
        ratios = [0, 0, 2, 1] + FLAT["compress_ratios"][4:]
        with pytest.raises(
            ConfigError, match=r"^compress_ratios\[3\] must give layer 3 .* \(layer 2: 2\), got 1; write 2"
        ):
            Config.released().replace(compress_ratios=ratios)

    def test_a_layer_before_every_source_has_a_window_alone(self) -> None:
        ratios = [0, 2] + FLAT["compress_ratios"][2:]
        with pytest.raises(
            ConfigError, match="^kv_source_layers must hold a layer at or before layer 1, whose ratio is 2"
        ):
            Config.released().replace(compress_ratios=ratios)

    def test_an_index_source_reads_latents_of_its_own_ratio(self) -> None:
        with pytest.raises(ConfigError, match=r"^compress_ratios\[20\] must give index source 20 .* \(layer 14: 2\)"):
            Config.released().replace(kv_source_layers=[2, 8, 14], candidate_source_layer=-1)

    def test_candidates_hold_the_picks(self) -> None:
        message = (
            "index_topk must be at most 505 here, got 512: 64 blocks x 8 minus the pinned block's 7; "
            "raise candidate_topk_blocks"
        )
        with pytest.raises(ConfigError) as caught:
            Config.released().replace(candidate_topk_blocks=64)
        assert str(caught.value) == message
        assert Config.released().replace(candidate_topk_blocks=64, index_topk=505).index_topk == 505

    def test_a_slip_in_the_heads_of_the_memory_is_told_at_once(self) -> None:
        with pytest.raises(ConfigError, match="^engram_num_embeddings must be at least 4500001500000 in every layer"):
            Config.released().replace(engram_vocab_size=1, engram_n_heads=10**6)

    def test_bf16_frees_the_widths_of_linear_maps_alone(self) -> None:
        plain = Config.tiny().replace(dtype="bf16", expert_dtype=None)
        assert plain.replace(dim=100, moe_inter_dim=50, q_lora_rank=33, o_lora_rank=3).dim == 100
        with pytest.raises(ConfigError, match="^head_dim must be a multiple of 32"):
            plain.replace(head_dim=80)
        with pytest.raises(ConfigError, match="^index_head_dim must be a multiple of 32"):
            plain.replace(index_head_dim=40)
        with pytest.raises(ConfigError, match="^moe_inter_dim must be a multiple of 32"):
            plain.replace(expert_dtype="fp4", moe_inter_dim=50)

    def test_draft_experts_fall_back_to_the_backbone(self) -> None:
        assert Config.released().replace(dspark_n_routed_experts=0).dspark_n_routed_experts == 0
        with pytest.raises(ConfigError, match=r"^dspark_n_activated_experts must be at most .*\(384\)"):
            Config.released().replace(dspark_n_routed_experts=0, dspark_n_activated_experts=385)

    def test_replace_knows_its_keys(self) -> None:
        with pytest.raises(ConfigError, match="^head_dims must be a key"):
            Config.released().replace(head_dims=1)

    def test_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            Config.released().dim = 1  # type: ignore[misc]


class TestPartsThatAreOff:
    @pytest.mark.parametrize("name", GOLDEN)
    def test_small_models_are_models(self, name: str) -> None:
        assert Config.from_dict(GOLDEN[name]).to_dict() == GOLDEN[name]

    def test_draft(self) -> None:
        ratios = FLAT["compress_ratios"][:40]
        off = Config.released().replace(
            n_mtp_layers=0, compress_ratios=ratios, dspark_noise_token_id=2**30, dspark_target_layer_ids=[9, 3, 99],
            dspark_n_activated_experts=500, dspark_block_size=0, dspark_markov_rank=0,
        )  # fmt: skip
        assert off.n_mtp_layers == 0

    def test_vision(self) -> None:
        off = Config.released().replace(vision_n_layers=0, image_token_id=2**30, vision_dim=7, vision_rope_theta=0)
        assert off.vision_n_layers == 0

    def test_memory(self) -> None:
        off = Config.released().replace(engram_layer_ids=[], engram_pad_id=2**30, engram_head_dim=3, engram_n_heads=0)
        assert off.engram_layer_ids == ()

    def test_candidates(self) -> None:
        off = Config.released().replace(candidate_source_layer=-1, candidate_topk_blocks=0, candidate_block_size=0)
        assert off.candidate_source_layer == -1

    def test_far_part(self) -> None:
        off = Config.released().replace(
            compress_ratios=[0] * 43, kv_source_layers=[], index_source_layers=[], candidate_source_layer=-1,
            index_n_heads=0, index_head_dim=0, index_topk=0,
        )  # fmt: skip
        assert off.kv_source_layers == ()

    def test_shared_expert_and_clamp(self) -> None:
        assert Config.released().replace(n_shared_experts=0, swiglu_limit=0).swiglu_limit == 0.0

    def test_yarn(self) -> None:
        off = Config.released().replace(original_seq_len=0, rope_factor=0, beta_fast=0, beta_slow=0)
        assert off.context == CONTEXT_WITHOUT_YARN


class TestForms:
    @pytest.mark.parametrize("config", [Config.released(), Config.tiny(), Config.tiny(compressed_vocab=700)])
    def test_written_and_read(self, config: Config, tmp_path: Path) -> None:
        special = SpecialIds(bos=3, eos=4, pad=5)
        flat, nested = tmp_path / "flat.json", tmp_path / "nested.json"
        flat.write_text(json.dumps(config.to_dict()))
        nested.write_text(json.dumps(config.to_hf(special)))
        assert Config.from_json(flat) == Config.from_json(nested) == config
        assert SpecialIds.from_json(nested) == special

    def test_parts_off_are_written_and_read(self, read: Any) -> None:
        config = Config.released().replace(original_seq_len=0, engram_layer_ids=[], vision_n_layers=0)
        assert read(config.to_hf(SPECIAL)) == config

    def test_what_to_hf_returns_is_the_callers(self) -> None:
        Config.released().to_hf(SPECIAL)["quantization_config"]["weight_block_size"].append(1)
        assert Config.released().to_hf(SPECIAL) == NESTED

    def test_bf16_has_no_nested_form(self, read: Any) -> None:
        plain = Config.tiny().replace(dtype="bf16")
        with pytest.raises(
            ConfigError, match="^dtype must be 'fp8' in the nested form, got 'bf16'; write the flat form"
        ):
            plain.to_hf(SPECIAL)
        assert read(plain.to_dict()) == plain

    def test_special_ids_lie_in_the_vocabulary(self) -> None:
        with pytest.raises(ConfigError, match="^eos_token_id must lie in 0 to 1023"):
            Config.tiny().to_hf(SpecialIds(bos=0, eos=1024, pad=2))

    def test_context(self) -> None:
        assert Config.released().context == 1_048_576
        assert Config.tiny().context == 8192
        assert isinstance(Config.tiny().context, int)


class TestEngramPrimes:
    def test_released(self) -> None:
        primes = engram_primes(2, 3, 8, 16_000_000)
        assert primes[0][0][:3] == (16000057, 16000079, 16000081)
        assert primes[1][2][7] == 16000889
        assert tuple(sum(map(sum, layer)) for layer in primes) == (384006168, 384016682)

    def test_small(self) -> None:
        primes = engram_primes(2, 3, 2, 90)
        assert primes[0] == ((97, 101), (103, 107), (109, 113))
        assert [sum(map(sum, layer)) for layer in primes] == [630, 834]

    @pytest.mark.parametrize("base", [0, 1, 2, 3, 4, 97, 1000])
    def test_against_a_sieve(self, base: int) -> None:
        composite = {multiple for n in range(2, 60) for multiple in range(2 * n, 3600, n)}
        primes = [n for n in range(max(base, 2), 3600) if n not in composite][:12]
        assert [p for layer in engram_primes(2, 3, 2, base) for size in layer for p in size] == primes
