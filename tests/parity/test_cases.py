"""Every recorded case, under each set of operations; and that each comparison is able to fail."""

from collections.abc import Callable

import pytest
import torch
from golden_folder import GOLDEN
from torch import Tensor

from openv41.model.layers import Rotary
from openv41.ops.cpu import CpuOps
from openv41.parity import Folder, Result, ops_named, select
from openv41.parity.cases import run_case

SETS = ("cpu", "reference")
CASES = [
    pytest.param(
        case.group, case.name, id=f"{case.group}-{case.name}", marks=[pytest.mark.slow] * (case.group == "model")
    )
    for case in select(Folder(GOLDEN))
    if case.group != "real"
]


def run(folder: Folder, group: str, name: str, ops: str = "cpu") -> Result:
    (case,) = select(folder, [group], [name])
    return run_case(case, ops_named(ops))


@pytest.mark.parametrize("ops", SETS)
@pytest.mark.parametrize(("group", "name"), CASES)
def test_case(golden: Folder, group: str, name: str, ops: str) -> None:
    result = run(golden, group, name, ops)
    assert result.status == "PASS", result.text
    assert result.findings or "reported" in result.text or "weights" in result.text


@pytest.mark.parametrize(
    ("group", "name"),
    [case for case in CASES if case.values[0] not in ("stack", "model")] + [("stack", "fp8_own_keys")],
)
def test_case_in_few_steps(golden: Folder, group: str, name: str) -> None:
    """`FastOps`, which is CpuOps but for what that takes from the specification or cuts to a cache's size."""
    result = run(golden, group, name, "fast")
    assert result.status == "PASS", result.text


@pytest.mark.slow
def test_a_model_in_few_steps(golden: Folder) -> None:
    result = run(golden, "model", "image_prompt", "fast")
    assert result.status == "PASS", result.text


@pytest.mark.slow
@pytest.mark.parametrize("ops", SETS)
def test_released_sizes(golden: Folder, ops: str) -> None:
    result = run(golden, "real", "layers_20_24", ops)
    assert result.status == "PASS", result.text
    assert len(result.findings) > 30


# Negative controls: one value changed in one recorded tensor


def changed(value: Tensor, at: int = -1) -> Tensor:
    """The tensor with one value (of an already defined entry) made another, well beyond any tolerance."""
    flat = value.clone().flatten()
    defined = flat.isfinite() if flat.is_floating_point() else torch.ones_like(flat, dtype=torch.bool)
    place = int(defined.nonzero()[at])
    if flat.dtype == torch.bool:
        flat[place] = ~flat[place]
    elif flat.is_floating_point():
        flat[place] = flat[place].float() + 4 * flat[defined].float().abs().max() + 1
    elif flat.dtype == torch.uint8:
        flat[place] = flat[place] ^ 0x46
    else:
        flat[place] += 1
    return flat.view_as(value)


CONTROLS = {
    ("rope", "table_compress"): "cos sin",
    ("rope", "apply_bfloat16_4d"): "forward inverse",
    ("rope", "apply_float32_3d"): "forward inverse",
    ("quant", "fp8_32_ue8m0_edge"): "q scale qdq",
    ("quant", "fp8_64_fp32scale_edge"): "q scale qdq",
    ("quant", "fp4_32_e8m0_edge"): "q scale qdq",
    ("quant", "fp4_16_e4m3_edge"): "q scale qdq",
    ("quant", "gemm_fp8_a"): "a_q a_scale out_float32 out_bfloat16",
    ("quant", "gemm_fp4_b"): "a_q a_scale out_float32 out_bfloat16",
    ("sparse_attn", "holes"): "out",
    ("compressor", "ratio2_len7"): "prefill_out decode_out decode_produced",
    ("compressor", "ratio1_len1"): "prefill_out decode_out decode_produced",
    ("indexer", "own_keys_ratio2"): "k_cache prefill_q prefill_scores prefill_idx decode_35_scores decode_36_idx",
    ("indexer", "candidates_prefill_partial"): "mask",
    ("indexer", "candidates_decode_wide"): "mask",
    ("window", "prefill_idx_w16_n17"): "idx",
    ("window", "decode_idx_w16_p17"): "idx",
    ("window", "ring_prefill13"): "y ring_after_prefill ring_after_step1 ring_after_step4 ring_end",
    ("block", "hc_split_sinkhorn_20"): "pre post comb",
    ("block", "hc_pre_post"): "mix_pre mix_post mix_comb hc_pre hc_post",
    ("block", "block_image"): "y next_pre_mix",
    ("block", "gate_sqrtsoftplus_image"): "indices weights",
    ("block", "expert_fp4_limit0.5"): "y y_routed",
    ("block", "moe"): "y_text y_image",
    ("block", "engram_hash_small"): "hash_prefill hash_decode primes offsets multipliers",
    ("block", "engram_hash_released"): "hash_prefill hash_decode primes offsets multipliers",
    ("block", "engram_text"): "y",
}
PAIRS = [(group, name, key) for (group, name), keys in CONTROLS.items() for key in keys.split()]


@pytest.mark.parametrize(("group", "name", "key"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_one_changed_value_fails(remade: Callable[..., Folder], group: str, name: str, key: str) -> None:
    def change(case: str, at: str, value: Tensor) -> Tensor:
        if (case, at) != (name, key):
            return value
        if key.endswith("idx") and group == "indexer":
            return untied_pick(value, torch.zeros(value.shape[:2], dtype=torch.bool))
        return changed(value, 0 if key.startswith("ring_after") else -1)

    result = run(remade(group, (), change), group, name)
    assert result.status == "FAIL" and key.partition("_")[0] in result.text, result.text


def test_changed_rows_of_an_open_group_fail(remade: Callable[..., Folder]) -> None:
    """Of what a group keeps only the rows of its own tokens count; the others are left from the group before."""
    for row, fails in ((0, True), (1, False)):
        for what in ("kv_state_after_prefill", "score_state_after_prefill"):

            def change(case: str, key: str, value: Tensor, what: str = what, row: int = row) -> Tensor:
                if (case, key) == ("ratio2_len7", what):
                    value[:, row] += 1
                return value

            result = run(remade("compressor", (), change), "compressor", "ratio2_len7")
            assert (result.status == "FAIL") == fails, result.text


def failing(result: Result) -> set[str]:
    return {finding.what for finding in result.findings if not finding.passed}


def untied_pick(picks: Tensor, tied: Tensor) -> Tensor:
    """Recorded picks with one of them moved, in the last row that has no tie."""
    row = (~tied[-1]).nonzero()[-1]
    picks = picks.clone()
    free = set(range(int(picks[-1, row, 0]), int(picks[-1, row, -1]))) - set(picks[-1, row].flatten().tolist())
    picks[-1, row, 0] = min(free)
    return picks


@pytest.mark.parametrize("name", ["fp8_as_written", "bf16_own_keys"])
def test_each_changed_tensor_of_a_stack_fails(remade: Callable[..., Folder], golden: Folder, name: str) -> None:
    case = golden.find("stack", name)
    assert case is not None
    skipped = ("x.", "w.", "tie.", "end.kv_state", "end.score_state", "prefill.kv_state", "prefill.score_state")
    keys = {key for key in case.tensors if not key.startswith(skipped)}

    def change(at: str, key: str, value: Tensor) -> Tensor:
        if at != name or key not in keys:
            return value
        if key.startswith("idx_"):
            tied = case[f"tie.{key[-1]}"]
            return untied_pick(value, tied[:, :50] if "prefill" in key else tied[:, 50:])
        return changed(value, 0 if key.startswith("candidates") else -1)

    result = run(remade("stack", (), change), "stack", name)
    assert keys <= failing(result), keys - failing(result)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("tower_4x5", {"cos", "sin", "features", "aligned"}, {"cos", "sin", "features", "aligned"}),
        ("photo_90x60", {"patches"}, {"patches"}),
        ("image_sizes", {"types_2x3"}, {"types_2x3"}),
    ],
)
def test_each_changed_tensor_of_vision_fails(
    remade: Callable[..., Folder], name: str, keys: set[str], told: set[str]
) -> None:
    def change(at: str, key: str, value: Tensor) -> Tensor:
        return changed(value) if at == name and key in keys else value

    assert failing(run(remade("vision", ("weights", name), change), "vision", name)) == told


@pytest.mark.slow
def test_each_changed_tensor_of_an_image_prompt_fails(remade: Callable[..., Folder]) -> None:
    keys = {"block_outputs", "block_pre_mix", "token_types"}

    def change(at: str, key: str, value: Tensor) -> Tensor:
        if at != "image_prompt" or key not in keys:
            return value
        if key == "token_types":  # the two cells of a line exchanged with its newline
            return value[:, [*range(7), 8, 7, *range(9, value.shape[1])]]
        value = value.clone()
        value[0, 0, 12:18] += 2.0
        return value

    result = run(remade("model", ("short_as_written", "image_prompt"), change), "model", "image_prompt")
    first = {f"{what}.0 from the picture on" for what in ("block_outputs", "block_pre_mix")}
    assert first | {"token_types"} <= failing(result), failing(result)


@pytest.mark.slow
def test_each_changed_tensor_of_a_model_fails(remade: Callable[..., Folder]) -> None:
    keys = {"block_outputs", "block_pre_mix", "main_hidden", "logits", "greedy_next"}

    def change(at: str, key: str, value: Tensor) -> Tensor:
        return changed(value) if at == "short_own_keys" and key in keys else value

    names = ("short_as_written", "short_own_keys")
    result = run(remade("model", names, change), "model", "short_own_keys")
    expected = {"block_outputs.5", "block_pre_mix.5", "main_hidden", "logits from the last block", "greedy_next"}
    assert expected <= failing(result), failing(result)


@pytest.mark.slow
def test_each_changed_tensor_of_released_sizes_fails(remade: Callable[..., Folder], golden: Folder) -> None:
    (case,) = golden.groups["real"]
    keys = {key for key in case.tensors if key != "kept_rows" and "tie" not in key}

    def change(at: str, key: str, value: Tensor) -> Tensor:
        if "idx" in key:  # three of the row's picks become others: two may be
            value = value.clone()
            row = value[0, 4 if "rows" in key else 0]
            row[:3] = row.max() + torch.arange(1, 4, dtype=value.dtype)
            return value
        if key.endswith(("y_rows.20", "y_rows.24")):
            value = value.clone()
            value[0, 0, 7] += 1
            return value
        return changed(value, 0 if ".scores." in key else -1) if key in keys else value

    result = run(remade("real", (), change), "real", case.name)
    assert keys <= failing(result), keys - failing(result)


# Negative controls: a fault in the operations


class Unrounded(CpuOps):
    def quantise(self, x, form):  # noqa: ANN001, ANN201
        return x


class Unturned(CpuOps):
    def rotate(self, x, cos, sin, inverse=False):  # noqa: ANN001, ANN201
        return x if inverse else super().rotate(x, cos, sin, inverse)


class Highest(CpuOps):
    def pick(self, scores, visible, k):  # noqa: ANN001, ANN201
        return super().pick(scores.neg(), visible, k)


@pytest.mark.parametrize("fault", [Unrounded, Unturned, Highest])
def test_a_fault_in_an_operation_fails(golden: Folder, fault: type[CpuOps]) -> None:
    case = golden.find("stack", "fp8_as_written")
    assert case is not None
    assert run_case(case, fault()).status == "FAIL"


# Negative controls: what V3.2 and V4 do and V4.1 does not, and slips that other ports of this family had


class Tempered(CpuOps):
    """YaRN's temperature, squared, on the scores of attention."""

    def sparse_attention(self, q, near, near_rows, far, far_rows, sink, scale):  # noqa: ANN001, ANN201
        return super().sparse_attention(q, near, near_rows, far, far_rows, sink, scale * 1.277**2)


class Normed(CpuOps):
    """Each head of the queries over its root mean square: a rotation does not change that."""

    def sparse_attention(self, q, *rest):  # noqa: ANN001, ANN002, ANN201
        return super().sparse_attention(torch.nn.functional.rms_norm(q, q.shape[-1:]), *rest)


class HalfSplit(CpuOps):
    """Entries i and i + half make a pair."""

    def rotate(self, x, cos, sin, inverse=False):  # noqa: ANN001, ANN201
        head, a, b = x.split((x.shape[-1] - 2 * cos.shape[-1], cos.shape[-1], cos.shape[-1]), -1)
        cos, sin = (angle.view(len(x), *[1] * (x.dim() - 2), -1) for angle in (cos, -sin if inverse else sin))
        return torch.cat((head, a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Uncut(CpuOps):
    """Index products below zero count."""

    def index_scores(self, q, weights, keys):  # noqa: ANN001, ANN201
        products = torch.einsum("nic,pc->nip", q.float(), keys.float())
        return (products * weights.float().unsqueeze(-1)).sum(1).to(q.dtype)


class Unclamped(CpuOps):
    def swiglu(self, gate, up, limit, routing):  # noqa: ANN001, ANN201
        return super().swiglu(gate, up, 0.0, routing)


class Sigmoid(CpuOps):
    def route(self, logits, bias, k, scale, function):  # noqa: ANN001, ANN201
        return super().route(logits, bias, k, scale, "sigmoid")


class Transposed(CpuOps):
    """Streams mixed by columns."""

    def expand(self, y, streams, post, comb):  # noqa: ANN001, ANN201
        return super().expand(y, streams, post, comb.mT)


@pytest.mark.parametrize(
    ("fault", "group", "name"),
    [
        (Tempered, "window", "ring_prefill13"),
        (Normed, "window", "ring_prefill13"),
        (HalfSplit, "window", "ring_prefill13"),
        (HalfSplit, "indexer", "own_keys_ratio2"),
        (Uncut, "indexer", "own_keys_ratio1"),
        (Unclamped, "block", "expert_fp4_limit0.5"),
        (Unclamped, "block", "expert_fp8_limit0.5"),
        (Sigmoid, "block", "gate_sqrtsoftplus_text"),
        (Transposed, "block", "hc_pre_post"),
    ],
)
def test_an_inherited_fault_fails(golden: Folder, fault: type[CpuOps], group: str, name: str) -> None:
    (case,) = select(golden, [group], [name])
    result = run_case(case, fault())
    assert result.status == "FAIL" and failing(result), result.text


@pytest.mark.parametrize(
    ("branch", "group", "name"), [(True, "window", "ring_prefill13"), (False, "indexer", "own_keys_ratio2")]
)
def test_one_branchs_angles_in_the_other_fail(
    golden: Folder, monkeypatch: pytest.MonkeyPatch, branch: bool, group: str, name: str
) -> None:
    """YaRN in a layer that has a window alone; and a compressed layer without it, at the other theta."""
    usual = Rotary.for_branch
    monkeypatch.setattr(Rotary, "for_branch", lambda config, compressed: usual(config, branch))
    result = run(golden, group, name)
    assert result.status == "FAIL" and failing(result), result.text


def test_the_published_fault_is_told_from_its_repair(remade: Callable[..., Folder]) -> None:
    """Taken for the other one, each of the two ways to keep index keys fails."""
    for was, now in (("as_written", "own_keys"), ("own_keys", "as_written")):

        def swap(entry: dict, now: str = now) -> None:
            entry["config"]["own_keys"] = now == "own_keys"

        result = run(remade("stack", (), edit=swap), "stack", f"fp8_{was}")
        assert result.status == "FAIL" and "idx_decode.1" in failing(result)
