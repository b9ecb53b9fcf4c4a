"""What is written can be read, by us and by others; and nothing half-written stays."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from broken_checkpoint import INDEX, module_of, read_shard
from safetensors import safe_open

from openv41.config import Config, SpecialIds
from openv41.errors import CheckpointError
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.names import BYTES, published_tensors, shard_of
from openv41.weights.tiny import SPECIAL, RandomWeights
from openv41.weights.write import tensors_of, write_checkpoint

# Small enough to be written many times: no vision, no memory, no draft.
SMALL = Config.tiny().replace(
    vision_n_layers=0,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    n_mtp_layers=0,
    compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
    n_routed_experts=2,
)


@cache
def _made(config: Config) -> dict[str, torch.Tensor]:
    source = RandomWeights(config, seed=1)
    return {name: source(name, spec) for name, spec in published_tensors(config).items()}


def small_tensors(config: Config = SMALL) -> dict[str, torch.Tensor]:
    return dict(_made(config))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_round_trip(tmp_path):
    tensors = small_tensors()
    write_checkpoint(tmp_path / "model", SMALL, SPECIAL, tensors, {"tokenizer.json": b"{}"})
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.config == SMALL
    assert SpecialIds.from_json(tmp_path / "model" / "config.json") == SPECIAL
    assert all(same(checkpoint.tensor(name), tensors[name]) for name in checkpoint.specs)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_other_readers_read_it(tmp_path):
    tensors = small_tensors()
    write_checkpoint(tmp_path / "model", SMALL, SPECIAL, tensors)
    for name, file in shard_of(SMALL).items():
        with safe_open(tmp_path / "model" / file, "pt") as shard:
            assert same(shard.get_tensor(name), tensors[name]), name


def test_index(tmp_path):
    write_checkpoint(tmp_path, SMALL, SPECIAL, small_tensors())
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"] == shard_of(SMALL)
    files = {tmp_path / file for file in index["weight_map"].values()}
    assert index["metadata"]["total_size"] == sum(len(read_shard(path)[1]) for path in files)
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, "config.json"} | {path.name for path in files}


def test_tensors_are_aligned(tmp_path):
    write_checkpoint(tmp_path, SMALL, SPECIAL, small_tensors())
    for path in tmp_path.glob("*.safetensors"):
        header, payload = read_shard(path)
        start = path.stat().st_size - len(payload)
        for entry in header.values():
            assert (start + entry["data_offsets"][0]) % BYTES[entry["dtype"]] == 0


def test_a_bf16_model_has_the_flat_configuration(tmp_path):
    config = SMALL.replace(dtype="bf16", expert_dtype=None)
    write_checkpoint(tmp_path, config, SPECIAL, small_tensors(config))
    assert Checkpoint.open(tmp_path).config == config
    assert json.loads((tmp_path / "config.json").read_text()) == config.to_dict()


def test_a_module_is_written_as_it_was_loaded(tiny, tmp_path):
    """Experts unstacked, bytes typed, fp32 back to bf16: every file comes out the same."""
    checkpoint = Checkpoint.open(tiny)
    widened = ("head.weight", "wgate.weight", "confidence_head.proj.weight")
    module = module_of(
        checkpoint.config, lambda path, stored: torch.float32 if path.endswith(widened) else stored, device="cpu"
    )
    load_into(module, checkpoint)
    write_checkpoint(tmp_path / "again", checkpoint.config, SPECIAL, tensors_of(module))
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tiny / path.name).read_bytes(), path.name


def test_a_dequantised_module_is_not_written(tmp_path):
    name = "layers.0.attn.wo_a"
    module = module_of(
        SMALL, lambda path, stored: torch.bfloat16 if path == f"{name}.weight" else stored, "cpu", [f"{name}.scale"]
    )
    with pytest.raises(CheckpointError, match=rf"{name}\.\w+"):
        write_checkpoint(tmp_path / "model", SMALL, SPECIAL, tensors_of(module))
    assert not list(tmp_path.iterdir())


# What is refused


def fails(tmp_path: Path, message: str, tensors, **options) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path, SMALL, SPECIAL, tensors, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), r"1 missing \(norm\.weight\)"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"1 surplus \(extra\)"),
        (
            lambda tensors: tensors.update({"norm.weight": torch.zeros(64, dtype=torch.bfloat16)}),
            r"norm\.weight must be torch\.bfloat16 \[128\], got torch\.bfloat16 \[64\]",
        ),
        (lambda tensors: tensors.update({"norm.weight": torch.zeros(128)}), r"got torch\.float32 \[128\]"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    tensors = small_tensors()
    change(tensors)
    fails(tmp_path / "model", message, tensors)
    assert not list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_what_was_there(tmp_path):
    """The old model stays whole when writing the new one breaks off."""
    write_checkpoint(tmp_path / "model", SMALL, SPECIAL, small_tensors())
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    source = RandomWeights(SMALL, seed=2)

    def until_the_head(name, spec):
        if name == "head.weight":
            raise KeyboardInterrupt
        return source(name, spec)

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "model", SMALL, SPECIAL, until_the_head, overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_overwriting_replaces_the_whole_folder(tmp_path):
    write_checkpoint(tmp_path / "model", SMALL, SPECIAL, small_tensors(), {"old.txt": b"old"})
    write_checkpoint(tmp_path / "model", SMALL, SPECIAL, RandomWeights(SMALL, seed=2), overwrite=True)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert not (tmp_path / "model" / "old.txt").exists()
    assert not same(checkpoint.tensor("embed.weight"), small_tensors()["embed.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_existing_folders(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"")
    fails(tmp_path / "photos", "is not empty", {})
    fails(tmp_path / "photos", "holds no model", {}, overwrite=True)
    fails(tmp_path / "file", "is a file", {}, overwrite=True)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/x", "", "..", "config.json", INDEX, "model-00001-of-00011.safetensors"]
)
def test_files_beside_have_plain_names_of_their_own(tmp_path, name):
    fails(tmp_path / "model", "plain name", small_tensors(), files={name: b""})
    assert not list(tmp_path.iterdir())
