"""Opening a checkpoint refuses everything that is not whole; loading fills exactly what there is."""

import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from broken_checkpoint import INDEX, Broken, cut, module_of, read_shard, write_shard
from torch import nn

from openv41.config import Config
from openv41.errors import CheckpointError, ConfigError
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.names import Spec, place, published_tensors, shard_of
from openv41.weights.shards import MAX_HEADER, build_header
from openv41.weights.tiny import RandomWeights

WQ = "layers.3.attn.wq_a"


def opening(folder: Path) -> str:
    """The error that opening the folder ends with."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


# Reading


def test_every_tensor_is_what_was_written(tiny):
    checkpoint = Checkpoint.open(tiny)
    source = RandomWeights(checkpoint.config, seed=0)
    for name, spec in checkpoint.specs.items():
        expected = source(name, spec)
        for tensor in (checkpoint.tensor(name), checkpoint.tensor(name, copy=True)):
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape, name
            assert torch.equal(bits(tensor), bits(expected)), name


def test_a_copy_is_its_own(tiny):
    checkpoint = Checkpoint.open(tiny)
    before = checkpoint.tensor("norm.weight", copy=True)
    checkpoint.tensor("norm.weight", copy=True).fill_(7)
    assert torch.equal(checkpoint.tensor("norm.weight"), before)


def test_a_single_file_needs_no_index(broken: Broken):
    checkpoint = Checkpoint.open(broken.folder)
    payload = b"".join(bits(checkpoint.tensor(name)).numpy().tobytes() for name in checkpoint.specs)
    for file in broken.folder.glob("model*"):
        file.unlink()
    (broken.folder / "model.safetensors").write_bytes(build_header(checkpoint.specs) + payload)
    single = Checkpoint.open(broken.folder)
    assert all(torch.equal(bits(single.tensor(name)), bits(checkpoint.tensor(name))) for name in single.specs)


def test_a_tensor_off_its_alignment_is_read(broken: Broken):
    path = broken.file("norm.weight")
    expected = Checkpoint.open(broken.folder).tensor("norm.weight", copy=True)
    header, payload = read_shard(path)
    text = json.dumps(header).encode()
    write_shard(path, text + b" " * (1 - len(text) % 2), payload)
    assert torch.equal(Checkpoint.open(broken.folder).tensor("norm.weight"), expected)


def test_an_unknown_name(tiny):
    with pytest.raises(CheckpointError, match="no tensor 'layers.99'"):
        Checkpoint.open(tiny).tensor("layers.99")


# Folders


def test_no_folder(tmp_path):
    assert "no model folder at" in opening(tmp_path / "nowhere")


def test_no_model_in_it(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"")
    assert "has no config.json" in opening(tmp_path)


def test_no_weights_in_it(broken: Broken):
    (broken.folder / INDEX).unlink()
    assert "has no weights" in opening(broken.folder)


def test_a_bad_config_is_a_config_error(broken: Broken):
    (broken.folder / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        Checkpoint.open(broken.folder)


# The index


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"{}", "must have a weight_map"),
        (b'{"weight_map": []}', "must have a weight_map"),
        (b'{"weight_map": {}}', "must have a weight_map"),
        (b"[" * 100_000, "is no JSON"),
    ],
)
def test_a_bad_index(broken: Broken, text, message):
    (broken.folder / INDEX).write_bytes(text)
    assert message in opening(broken.folder)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "config.json", "", 7]
)
def test_a_shard_is_a_plain_name(broken: Broken, file):
    broken.change_json(INDEX, lambda index: index["weight_map"].update({"norm.weight": file}))
    message = opening(broken.folder)
    assert "norm.weight" in message and repr(file) in message and "plain" in message


def test_a_shard_that_is_not_there(broken: Broken):
    path = broken.file("norm.weight")
    path.unlink()
    assert f"{path.name} cannot be read: No such file" in opening(broken.folder)


def test_a_name_that_only_the_index_has(broken: Broken):
    broken.change_json(INDEX, lambda index: index["weight_map"].update({"extra": index["weight_map"]["norm.weight"]}))
    assert "1 in the index but not in the file it names: extra" in opening(broken.folder)


def test_a_name_that_only_a_file_has(broken: Broken):
    broken.change_json(INDEX, lambda index: index["weight_map"].pop("norm.weight"))
    assert "1 in a file but not in the index: norm.weight" in opening(broken.folder)


def test_a_wrong_total(broken: Broken):
    broken.change_json(INDEX, lambda index: index["metadata"].update(total_size=5))
    assert "total_size 5" in opening(broken.folder)


# Shard files


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: cut(path, -1), "is truncated"),
        (lambda path: cut(path, 1), "is longer than its tensors"),
        (lambda path: path.write_bytes(b"abc"), "no whole safetensors file"),
        (lambda path: path.write_bytes(b""), "no whole safetensors file"),
        (lambda path: os.truncate(path, 100), "no whole safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "no whole safetensors file"),
        (lambda path: write_shard(path, b"{nonsense", b""), "is no JSON"),
        (lambda path: write_shard(path, b"[1, 2]", b""), "must be a JSON object"),
        (lambda path: write_shard(path, b"\xff\xff", b""), "is no JSON"),
        (lambda path: write_shard(path, b'{"a": 1, "a": 1}', b""), "appears twice"),
    ],
)
def test_a_damaged_file(broken: Broken, change, message):
    path = broken.file("norm.weight")
    change(path)
    error = opening(broken.folder)
    assert message in error and path.name in error


def test_a_huge_header_is_not_read(broken: Broken):
    """The length is bounded even when a sparse file is long enough for it."""
    path = broken.file("norm.weight")
    with path.open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(10 * MAX_HEADER)
    assert f"at most {MAX_HEADER}" in opening(broken.folder)


NORM = {"dtype": "BF16", "shape": [128], "data_offsets": [262144, 262400]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, "must have a dtype"),
        ({"dtype": "BF16", "shape": [128]}, "must have a dtype"),
        (NORM | {"more": 1}, "must have a dtype"),
        (NORM | {"data_offsets": [0]}, "must have a dtype"),
        (NORM | {"shape": [-128]}, "no counts"),
        (NORM | {"shape": [128.0]}, "no counts"),
        (NORM | {"shape": [True]}, "no counts"),
        (NORM | {"data_offsets": [-1, 255]}, "no counts"),
        (NORM | {"dtype": "F64"}, "type F64"),
        (NORM | {"shape": [127]}, "which is 254 bytes, but its offsets span 256"),
        (NORM | {"data_offsets": [262400, 262144]}, "span -256"),
        (NORM | {"data_offsets": [262142, 262398]}, "overlaps"),
        (NORM | {"data_offsets": [0, 256]}, "overlaps"),
        (NORM | {"data_offsets": [262146, 262402]}, "gap"),
        (NORM | {"data_offsets": [10**15, 10**15 + 256]}, "gap"),
    ],
)
def test_a_bad_entry(broken: Broken, entry, message):
    path = broken.file("norm.weight")
    broken.change_header(path, lambda header: header.update({"norm.weight": dict(NORM)}))
    header = json.loads(
        json.dumps({"head.weight": {"dtype": "BF16", "shape": [1024, 128], "data_offsets": [0, 262144]}})
    )
    write_shard(path, json.dumps(header | {"norm.weight": NORM}).encode(), read_shard(path)[1])
    Checkpoint.open(broken.folder)  # sound so far
    write_shard(path, json.dumps(header | {"norm.weight": entry}).encode(), read_shard(path)[1])
    error = opening(broken.folder)
    assert message in error and path.name in error


# Against the configuration


def test_missing(broken: Broken):
    broken.change_tensors(broken.file(f"{WQ}.weight"), lambda specs: specs.pop(f"{WQ}.weight"))
    assert f"1 missing: {WQ}.weight" in opening(broken.folder)


def test_many_missing_are_counted(broken: Broken):
    """A configuration with a layer's worth more experts: the names are listed up to ten."""
    broken.change_json("config.json", lambda config: config["text_config"].update(n_routed_experts=9))
    error = opening(broken.folder)
    assert re.search(r"48 missing: (layers\.\d\.ffn\.experts\.8\.\S+ ){9}\S+, and 38 more", error)
    assert "24 of another shape" in error and len(error) < 5000


def test_surplus(broken: Broken):
    broken.change_tensors(
        broken.file("norm.weight"), lambda specs: specs.update({"layers.0.attn.ape": Spec((4, 4), "F32")})
    )
    assert "1 surplus: layers.0.attn.ape" in opening(broken.folder)


def test_a_scale_that_no_weight_uses(broken: Broken):
    """A checkpoint whose scales go by another name must not load without them."""
    name = "layers.3.ffn.gate.scale"
    broken.change_tensors(broken.file("norm.weight"), lambda specs: specs.update({name: Spec((1, 4), "F8_E8M0")}))
    assert f"1 scales that no weight uses: {name}" in opening(broken.folder)


def test_scales_under_another_name(broken: Broken):
    def rename(specs):
        specs[f"{WQ}.weight_scale_inv"] = specs.pop(f"{WQ}.scale")

    broken.change_tensors(broken.file(f"{WQ}.weight"), rename)
    error = opening(broken.folder)
    assert f"1 missing: {WQ}.scale" in error and f"no weight uses: {WQ}.weight_scale_inv" in error


def test_scales_of_large_blocks(broken: Broken):
    broken.change_tensors(
        broken.file(f"{WQ}.weight"), lambda specs: specs.update({f"{WQ}.scale": Spec((1, 1), "F8_E8M0")})
    )
    error = opening(broken.folder)
    assert f"1 of another shape: {WQ}.scale [1, 1] instead of [2, 4]" in error and "128 x 128 blocks" in error


def test_another_shape(broken: Broken):
    broken.change_tensors(broken.file("norm.weight"), lambda specs: specs.update({"norm.weight": Spec((256,), "BF16")}))
    assert "norm.weight [256] instead of [128]" in opening(broken.folder)


def test_another_type(broken: Broken):
    broken.change_tensors(broken.file("norm.weight"), lambda specs: specs.update({"norm.weight": Spec((128,), "F32")}))
    assert "1 of another type: norm.weight F32 instead of BF16" in opening(broken.folder)


def test_a_name_in_two_files(broken: Broken):
    other = broken.file("embed.weight")
    header, payload = read_shard(other)
    header["norm.weight"] = {"dtype": "BF16", "shape": [128], "data_offsets": [len(payload), len(payload) + 256]}
    write_shard(other, json.dumps(header).encode(), payload + bytes(256))
    assert "1 in two files: norm.weight" in opening(broken.folder)


# Into a module


def fp32_where_the_model_is(path: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if path.endswith(("head.weight", "wgate.weight", "confidence_head.proj.weight")) else dtype


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_every_parameter_is_filled(tiny, device):
    checkpoint = Checkpoint.open(tiny)
    module = module_of(checkpoint.config, fp32_where_the_model_is, device)
    before = dict(module.named_parameters())
    calls: list[tuple[str, int, int]] = []
    load_into(module, checkpoint, progress=lambda *call: calls.append(call))
    parameters = dict(module.named_parameters())
    for name in checkpoint.specs:
        where = place(name)
        parameter = parameters[where.parameter].detach()
        value = parameter if where.index is None else parameter[where.index]
        expected = checkpoint.tensor(name)
        if parameter.dtype == torch.float32:
            assert torch.equal(value, expected.float()), name
        else:
            assert torch.equal(bits(value), bits(expected)), name
    assert parameters["layers.0.ffn.experts.w1.weight"].dtype == torch.uint8
    for path, parameter in parameters.items():
        assert parameter.requires_grad == (parameter.dtype in (torch.bfloat16, torch.float32)), path
        assert device == "meta" or parameter is before[path]  # filled where it was
    assert [name for name, _, _ in calls] == list(checkpoint.specs)
    sizes = [spec.nbytes for spec in checkpoint.specs.values()]
    assert [done for _, done, _ in calls] == [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert {total for _, _, total in calls} == {checkpoint.nbytes} == {sum(sizes)}


def test_a_shared_parameter_stays_shared(tiny):
    checkpoint = Checkpoint.open(tiny)
    module = module_of(checkpoint.config)
    module.get_submodule("mtp.0").add_module("embed", module.get_submodule("embed"))
    module.get_submodule("mtp.1").register_parameter("norm_again", module.get_parameter("norm.weight"))
    load_into(module, checkpoint)
    assert module.get_parameter("mtp.0.embed.weight") is module.get_parameter("embed.weight")
    assert module.get_parameter("mtp.1.norm_again") is module.get_parameter("norm.weight")
    assert torch.equal(module.get_parameter("mtp.1.norm_again").detach(), checkpoint.tensor("norm.weight"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_float_weight_takes_the_dequantised_one(tiny, dtype):
    """Weight times 2**(byte - 127), written out tile by tile and row by row."""
    checkpoint = Checkpoint.open(tiny)
    name, expert = "layers.3.attn.wo_a", "layers.3.ffn.experts.w2"
    module = module_of(
        checkpoint.config,
        lambda path, stored: dtype if path == f"{name}.weight" else stored,
        skip=[f"{name}.scale", f"{expert}.scale"],
    )
    wide = nn.Parameter(torch.empty(8, 128, 64, dtype=dtype))
    module.get_submodule(expert).weight = wide
    load_into(module, checkpoint)

    stored, scale = checkpoint.tensor(f"{name}.weight").float(), checkpoint.tensor(f"{name}.scale").view(torch.uint8)
    expected = stored.clone()
    for row in range(stored.shape[0]):
        for tile in range(scale.shape[1]):
            expected[row, tile * 32 : tile * 32 + 32] *= 2.0 ** (int(scale[row // 32, tile]) - 127)
    assert torch.equal(module.get_parameter(f"{name}.weight").float(), expected)
    assert module.get_parameter(f"{name}.weight").requires_grad

    e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = checkpoint.tensor("layers.3.ffn.experts.7.w2.weight").view(torch.uint8)
    scales = checkpoint.tensor("layers.3.ffn.experts.7.w2.scale").view(torch.uint8)
    row = wide[7, 5].tolist()
    for i, value in enumerate(row):
        code = int(codes[5, i // 2]) >> (4 * (i % 2)) & 15
        assert value == (-1) ** (code >> 3) * e2m1[code & 7] * 2.0 ** (int(scales[5, i // 32]) - 127)


def test_parts_are_left_out_by_name_only(tiny):
    checkpoint = Checkpoint.open(tiny)
    module = module_of(checkpoint.config)
    del module.mtp
    with pytest.raises(CheckpointError, match="tensors without a parameter: mtp"):
        load_into(module, checkpoint)
    totals = set()
    load_into(module, checkpoint, lambda name, done, total: totals.add(total - done), without=("mtp.",))
    assert not any(parameter.is_meta for parameter in module.parameters()) and 0 in totals
    with pytest.raises(CheckpointError, match="1 parameters without a tensor: norm.weight"):
        load_into(module, checkpoint, without=("mtp.", "norm."))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.register_parameter("mine", nn.Parameter(torch.empty(1))), "1 parameters without a tensor: mine"),
        (lambda m: delattr(m, "norm"), "1 tensors without a parameter: norm.weight"),
        (lambda m: delattr(m, "layers"), r"tensors without a parameter: layers\.0\.\S+, .* and \d+ more"),
        (
            lambda m: setattr(m.norm, "weight", nn.Parameter(torch.empty(64, dtype=torch.bfloat16))),
            r"1 of another shape: norm\.weight \(128,\) for a parameter \(64,\)",
        ),
        (
            lambda m: setattr(m.norm, "weight", nn.Parameter(torch.empty(128, dtype=torch.float16))),
            r"cannot take: norm\.weight BF16 for torch\.float16",
        ),
        (
            lambda m: setattr(
                m.get_submodule("layers.0.attn"), "attn_sink", nn.Parameter(torch.empty(4, dtype=torch.bfloat16))
            ),
            r"cannot take: layers\.0\.attn\.attn_sink F32 for torch\.bfloat16",
        ),
        (
            lambda m: delattr(m.get_submodule("layers.0.attn.wq_b"), "scale"),
            r"1 tensors without a parameter: layers\.0\.attn\.wq_b\.scale",
        ),
        (
            lambda m: setattr(
                m.get_submodule("layers.0.ffn.experts.w1"),
                "weight",
                nn.Parameter(torch.empty(9, 64, 64, dtype=torch.uint8), requires_grad=False),
            ),
            r"8 of another shape: layers\.0\.ffn\.experts\.0\.w1\.weight \(8, 64, 64\) for a parameter \(9, 64, 64\)",
        ),
    ],
)
def test_a_module_that_does_not_fit(tiny, change, message):
    checkpoint = Checkpoint.open(tiny)
    module = module_of(checkpoint.config)
    change(module)
    with pytest.raises(CheckpointError, match=message):
        load_into(module, checkpoint)
    assert all(parameter.is_meta for parameter in module.get_submodule("embed").parameters())  # nothing was touched


def test_an_empty_module_is_no_success(tiny):
    """Zero tensors loaded without an error is the worst outcome."""
    with pytest.raises(CheckpointError, match="852 tensors without a parameter"):
        load_into(nn.Module(), Checkpoint.open(tiny))


# Large tables


def peak_since(start: bool) -> int:
    """Peak resident bytes since the call with `start`."""
    if start:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            pytest.skip("this system does not let a process reset its peak")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory use from /proc")
def test_a_table_of_the_released_size_is_not_read(tiny, tmp_path):
    """98 GB of table, sparse on the disk: opening, loading and looking up rows takes less than 10 MB."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("the address space is limited")
    released = Config.released()
    same = ("engram_vocab_size", "engram_num_embeddings", "engram_n_heads", "engram_head_dim")
    config = Config.tiny(compressed_vocab=847).replace(**{key: getattr(released, key) for key in same})
    folder = tmp_path / "large"
    shutil.copytree(tiny, folder)
    shards: dict[str, dict[str, Spec]] = {}
    specs = published_tensors(config)
    for name, file in shard_of(config).items():
        if "engram" in name:
            shards.setdefault(file, {})[name] = specs[name]
    for file, held in shards.items():
        (folder / file).write_bytes(build_header(held))
        cut(folder / file, sum(spec.nbytes for spec in held.values()))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    Broken(folder).change_json(INDEX, lambda index: index.update(metadata={}))
    table = next(name for name in specs if name.endswith("engram.embed.weight"))

    base = peak_since(start=True)
    checkpoint = Checkpoint.open(folder)
    rows = torch.arange(24) * ((specs[table].shape[0] - 1) // 23)
    mapped = checkpoint.tensor(table)
    assert mapped.shape == (384_006_168, 256) and mapped.dtype == torch.float8_e4m3fn
    assert not mapped.view(torch.uint8)[rows].any()
    assert peak_since(start=False) - base < 10e6

    module = module_of(config)
    base = peak_since(start=True)
    load_into(module, checkpoint)
    parameter = module.get_parameter(table)
    assert parameter.shape == mapped.shape and not parameter.requires_grad
    assert not parameter.view(torch.uint8)[rows].any()
    assert peak_since(start=False) - base < 40e6  # the other weights are about 10 MB
