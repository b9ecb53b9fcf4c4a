"""No tensor of the size tokens x positions x heads ever exists: the peak of a long prefill is held."""

from tests.memory import told_by

TOKENS = 16384
BUDGET = 32 << 20
ALLOWED = 400 << 20
"""Bytes above the process before the prefill. The scores of all tokens at once would take 1 GiB in bf16 (2 heads); the
streams and what a layer makes of them take about 100 MiB."""

PROGRAM = f"""
import torch
from openv41.model.indexer import Indexer
from openv41.ops import choose
from openv41.state import Cache
from tests.memory import peak
from tests.small import small_config, small_model, tokens

torch.set_num_threads(1)
config = small_config(original_seq_len=4096, index_topk=64, candidate_topk_blocks=128, candidate_block_size=8)
model = small_model(config, choose("cpu", "cpu", weights="fp32"), 0)
for module in model.modules():
    if isinstance(module, Indexer):
        module.score_bytes = {BUDGET}
cache = Cache(config, 1, {TOKENS})
slot = cache.open()
ids = tokens(config, {TOKENS}, 1)
with torch.no_grad():
    step = cache.step([(slot, ids[:256])])
    model(step, cache)
    before = peak()
    model(cache.step([(slot, ids[256:])]), cache)
    after = peak()
print(after - before)
"""


def test_a_prefill_of_16384_tokens_stays_within_its_budget() -> None:
    peak = told_by(PROGRAM)
    print(f"{peak >> 20} MiB above the start")
    assert 0 < peak < ALLOWED
