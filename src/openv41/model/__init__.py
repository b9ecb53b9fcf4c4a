"""The textbook. Read it in this order: streams, layers, attention, far, compressor, indexer, experts, engram, block,
vision, transformer, draft; and `picking`, the ways to an indexer's picks, last.

One legend of letters for every shape: `n` tokens in this step, `t` rows attended to, `h` heads, `d` head dim, `dim`
model width, `m` streams, `k` picks, `e` experts, `i` index heads, `c` index dim, `r` low rank, `g` output groups,
`v` vocabulary, `w` window rows, `a`, `b` rows of a table, `p` compressed positions of one sequence. In the draft `b` is
sequences, one block of places each.

Parameters keep the published names (`wq_a`, `kv_norm`, `attn_sink`): a checkpoint loads by name. Modules, methods
and locals use whole words. Every part is made with an `ops`, the operations it runs on; no part keeps state.
"""
