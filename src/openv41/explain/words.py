"""Why each component is there, in sentences that say what they rest on: keys of the configuration and lines of source.

Lines are looked up when they are shown, so they follow the source.
"""

import inspect
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from openv41.config import Config
from openv41.plan import LayerPlan, Role


@dataclass(frozen=True)
class Statement:
    """A sentence, the keys it rests on, and where the source says so ("model.attention:Attention.query")."""

    text: str
    keys: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


def far_words(config: Config, row: LayerPlan) -> list[Statement]:
    far = "model.far:"
    match row.role:
        case Role.WINDOW if row.half == "draft":
            return [
                Statement(
                    "In a draft stage, the window holds vectors made of what the model's upper layers said of the "
                    "last tokens, and every drafted token also sees the whole block it is drafted in.",
                    ("dspark_target_layer_ids", "dspark_block_size"),
                    ("model.draft:Stage.attend", "model.draft:Draft.vectors"),
                )
            ]
        case Role.WINDOW:
            return [
                Statement(
                    "This layer has no far part: what lies before the window reaches it through the layers' results.",
                    ("compress_ratios",),
                    ("model.attention:Attention._far_part",),
                )
            ]
        case Role.SOURCE | Role.CANDIDATE_SOURCE:
            statements = [
                Statement(
                    f"It is a source: it makes one latent of every {row.ratio} token(s) of its own input, an index key "
                    f"of each latent, and picks up to {config.index_topk} latents a token; the layers below read all "
                    "three.",
                    ("kv_source_layers", "compress_ratios", "index_topk"),
                    (far + "Source", "model.compressor:Compressor", "model.indexer:Indexer"),
                )
            ]
            if row.publishes_candidates:
                statements.append(
                    Statement(
                        f"It also names the {config.candidate_topk_blocks} best blocks of "
                        f"{config.candidate_block_size} neighbouring positions, within which later layers pick.",
                        ("candidate_source_layer", "candidate_topk_blocks", "candidate_block_size"),
                        ("ops.reference:ReferenceOps.pick_blocks",),
                    )
                )
            return statements
        case Role.RESCORER:
            inside = "" if row.within is None else f" within the blocks that layer {row.within} chose,"
            return [
                Statement(
                    f"It picks anew,{inside} with queries of its own against the index keys that layer "
                    f"{row.latents_from} left: it makes no keys and no latents, so its indexer has no key projection.",
                    ("index_source_layers", "candidate_source_layer"),
                    (far + "Rescorer", "model.picking:_pick_inside"),
                )
            ]
        case Role.READER:
            return [
                Statement(
                    f"It reads latents of layer {row.latents_from} where layer {row.picks_from} picked, "
                    "and decides nothing about the far past itself.",
                    ("kv_source_layers", "index_source_layers"),
                    (far + "Reader",),
                )
            ]


def attention_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"Every token has {config.n_heads} queries, made by way of a vector of {config.q_lora_rank}, and one "
            f"vector of {config.head_dim} that is key and value of all heads; the layer keeps the last "
            f"{config.window_size}.",
            ("n_heads", "q_lora_rank", "head_dim", "window_size"),
            ("model.attention:Attention.query", "model.attention:Attention.window"),
        ),
        *far_words(config, row),
        Statement(
            "One softmax runs over both lists; a learned sink a head takes part of the probability and gives nothing.",
            (),
            ("ops.reference:ReferenceOps.sparse_attention",),
        ),
        Statement(
            f"Values carry the rotation of their position, so the result is turned back by the token's own, and then "
            f"{config.o_groups} groups of heads are brought to {config.o_lora_rank} each before one map to the model's "
            "width.",
            ("o_groups", "o_lora_rank", "rope_head_dim"),
            ("model.attention:Attention.attend", "model.attention:Attention.output"),
        ),
    ]


def query_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"Two maps with a norm between, {config.dim} -> {config.q_lora_rank} -> {config.n_heads} x "
            f"{config.head_dim}, cost a quarter of one map; the narrow vector also feeds the indexer.",
            ("dim", "q_lora_rank", "n_heads", "head_dim"),
            ("model.attention:Attention.query",),
        ),
        Statement(
            f"The last {config.rope_head_dim} entries of a head are turned by the token's position, with base "
            f"{row.theta:.15g}{' stretched by YaRN' if row.yarn else ''}.",
            ("rope_head_dim", "rope_theta", "compress_rope_theta", "rope_factor"),
            ("model.layers:Rotary",),
        ),
    ]


def window_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"One vector of {config.head_dim} a token is key and value of all heads, so a ring of "
            f"{config.window_size} rows is all that a layer keeps of its own, whatever the length.",
            ("head_dim", "window_size"),
            ("model.attention:Attention.window", "state.tables:Ring"),
        ),
        Statement(
            "Rows are rounded to fp8 with a power-of-two scale for 32 values, the rotated tail included.",
            (),
            ("model.attention:Attention.stored", "formats:BlockFormat"),
        ),
    ]


def compressor_words(config: Config, row: LayerPlan) -> list[Statement]:
    how = (
        "A projection and a norm: one latent a token."
        if row.ratio == 1
        else f"Per channel, a softmax over the group's gates weights its {row.ratio} values, in float32; a group whose "
        "last token has not come yet waits in the cache, and no token sees it."
    )
    return [
        Statement(how, ("compress_ratios",), ("model.compressor:Compressor", "ops.reference:ReferenceOps.pool")),
        Statement(
            "Latents are rounded to fp4 with an e4m3 scale for 16 values after rotation by their first token's "
            "position; the index key is made of the latent before both.",
            (),
            ("model.far:Source.publish",),
        ),
    ]


def indexer_words(config: Config, row: LayerPlan) -> list[Statement]:
    statements = [
        Statement(
            f"{config.index_n_heads} small heads score every position: the sum of relu(query . key) times a weight "
            f"that the token gives each head; the best {config.index_topk} are picked, ties to the lower position.",
            ("index_n_heads", "index_head_dim", "index_topk"),
            ("model.indexer:Indexer", "ops.reference:ReferenceOps.index_scores", "ops.reference:ReferenceOps.pick"),
        ),
        Statement(
            "Up to so many visible positions, all are picked and nothing is scored.",
            ("index_topk",),
            ("model.picking:by_runs",),
        ),
    ]
    if row.within is not None:
        statements.append(
            Statement(
                f"Far from the start it scores the {config.candidate_topk_blocks * config.candidate_block_size} "
                "candidate positions alone.",
                ("candidate_topk_blocks", "candidate_block_size"),
                ("model.picking:_pick_inside",),
            )
        )
    return statements


def candidate_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"A block of {config.candidate_block_size} positions counts by its best score; the newest block always "
            f"stays, and {config.candidate_topk_blocks} are kept. It costs no product: scores are there already.",
            ("candidate_topk_blocks", "candidate_block_size", "candidate_source_layer"),
            ("ops.reference:ReferenceOps.pick_blocks", "model.picking:_keep"),
        )
    ]


def sparse_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"At most {config.window_size} + {config.index_topk} rows a token, whatever the length: 4 x heads x head "
            "width operations a row, and each row is read once for all heads.",
            ("window_size", "index_topk", "n_heads", "head_dim"),
            ("ops.reference:ReferenceOps.sparse_attention",),
        )
    ]


def output_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{config.n_heads} x {config.head_dim} values go to {config.o_groups} x {config.o_lora_rank} group by "
            f"group, in bf16, and from there to {config.dim}.",
            ("n_heads", "head_dim", "o_groups", "o_lora_rank", "dim"),
            ("model.attention:Attention.output",),
        )
    ]


def streams_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{config.hc_mult} residual streams instead of one: a sublayer reads one mix of them and is written to "
            "all, which are mixed with each other by a doubly stochastic matrix (Sinkhorn) on the way.",
            ("hc_mult", "hc_sinkhorn_iters", "hc_eps"),
            ("model.streams:HyperConnection", "ops.reference:ReferenceOps.mix"),
        ),
        Statement(
            "The mix that is read was made one sublayer earlier, so its small product can run beside the sublayer.",
            (),
            ("model.streams:Streams",),
        ),
    ]


def router_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{row.experts} experts are scored in float32 ({config.score_func}); a learned bias helps to choose "
            f"{row.experts_per_token} and is left out of their weights. Image tokens have a bias of their own.",
            ("n_routed_experts", "n_activated_experts", "score_func", "route_scale"),
            ("model.experts:Router", "ops.reference:ReferenceOps.route"),
        )
    ]


def experts_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{row.experts_per_token} of {row.experts} networks of inner width {config.moe_inter_dim} run for a token, "
            f"in fp4, and {config.n_shared_experts} shared one for every token, in fp8.",
            ("moe_inter_dim", "n_shared_experts", "expert_dtype"),
            ("model.experts:Experts",),
        ),
        Statement(
            "The routing weight is applied before the last map, and passes through its activation quantiser.",
            ("swiglu_limit",),
            ("ops.reference:ReferenceOps.swiglu",),
        ),
        Statement(
            "How many experts a call reads is an expectation: all chosen equally often.",
            (),
            ("explain.counting:distinct",),
        ),
    ]


def engram_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"The last 2 to {config.engram_max_ngram_size} tokens are hashed by {config.engram_n_heads} functions for "
            f"each length to rows of a table: "
            f"{(config.engram_max_ngram_size - 1) * config.engram_n_heads} rows of {config.engram_head_dim} a token, "
            "wherever the table lies (memory, host, disk).",
            ("engram_max_ngram_size", "engram_n_heads", "engram_head_dim", "engram_num_embeddings"),
            ("model.engram:hash_rows", "ops.reference:ReferenceOps.look_up_rows"),
        ),
        Statement(
            "The rows become one key a stream and one value; how far stream and key agree opens the gate.",
            ("hc_mult",),
            ("model.engram:Engram.recall", "ops.reference:ReferenceOps.engram_gate"),
        ),
    ]


def block_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            "Memory in two layers, then attention, then experts, each read from the streams and written to them.",
            ("engram_layer_ids",),
            ("model.block:Block.forward",),
        )
    ]


def embedding_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"A row of {config.dim} a token, copied to the {config.hc_mult} streams; the first reader takes the first.",
            ("vocab_size", "dim", "hc_mult"),
            ("model.transformer:Transformer.begin", "model.streams:Streams.start"),
        )
    ]


def head_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            "One mix of the streams, a norm, and a map to the vocabulary in float32, for the tokens whose logits are "
            "wanted: one a sequence, unless a draft is verified or a text scored.",
            ("vocab_size", "dim"),
            ("model.transformer:Transformer.logits",),
        )
    ]


def draft_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{config.n_mtp_layers} small layers propose {config.dspark_block_size} tokens at once, from what layers "
            f"{', '.join(map(str, config.dspark_target_layer_ids))} were about to read; the model verifies them in one "
            "step.",
            ("n_mtp_layers", "dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id"),
            ("model.draft:Draft", "model.draft:Stage"),
        ),
        Statement(
            "The block is not causal, so it is always run whole; only the heads may stop earlier.",
            ("dspark_block_size",),
            ("model.draft:Draft.begin",),
        ),
    ]


def markov_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"The token before adds to the logits through a bottleneck of {config.dspark_markov_rank}: so tokens of "
            "one block, made side by side, follow each other after all.",
            ("dspark_markov_rank", "vocab_size"),
            ("model.draft:MarkovHead", "model.draft:Drafting.next"),
        )
    ]


def confidence_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            "One number a drafted token, of its hidden state and the Markov embedding of the token before: whether to "
            "go on drafting.",
            ("dspark_markov_rank",),
            ("model.draft:ConfidenceHead",),
        )
    ]


def vision_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"Patches of {config.vision_patch_size} x {config.vision_patch_size} pixels; every patch of a picture sees "
            f"every other, in {config.vision_n_layers} blocks of width {config.vision_dim}; pictures are packed "
            "without padding.",
            ("vision_patch_size", "vision_n_layers", "vision_dim", "vision_n_heads", "vision_inter_dim"),
            ("model.vision:VisionTower", "model.vision:VisionAttention"),
        )
    ]


def aligner_words(config: Config, row: LayerPlan) -> list[Statement]:
    ratio = config.vision_downsample_ratio
    return [
        Statement(
            f"{ratio} x {ratio} neighbours become one row of the model's width, which stands in the prompt like an "
            "embedded token; a grid that does not divide is filled up with zeros.",
            ("vision_downsample_ratio", "dim"),
            ("model.vision:Aligner",),
        )
    ]


def delimiter_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            "Three learned rows: they open a picture's span, close each of its lines, and close the span.",
            ("image_token_id",),
            ("model.transformer:Transformer._span",),
        )
    ]


def model_words(config: Config, row: LayerPlan) -> list[Statement]:
    return [
        Statement(
            f"{config.n_layers} layers over {config.hc_mult} streams of width {config.dim}. What a sequence keeps "
            "grows only in the sources' latents and index keys; all else is of fixed size.",
            ("n_layers", "hc_mult", "dim", "kv_source_layers"),
            ("model.transformer:Transformer.forward", "state.kinds:bytes_of_slot"),
        ),
        Statement(
            "In a prefill, layers from the last source on run only the tokens that can still matter.",
            ("kv_source_layers", "window_size"),
            ("model.transformer:Halo",),
        ),
    ]


# Evidence


def evidence_of(config: Config, statements: list[Statement]) -> list[dict[str, Any]]:
    """Each statement with the keys' values and the file and lines of its source."""
    return [
        {
            "statement": one.text,
            "keys": {key: getattr(config, key) for key in one.keys},
            "source": [source_of(name) for name in one.source],
        }
        for one in statements
    ]


def source_of(name: str) -> dict[str, Any]:
    """File (as in the repository), first and last line of "module:Qualified.name"."""
    module_name, _, qualified = name.partition(":")
    value: Any = import_module(f"openv41.{module_name}")
    for part in qualified.split("."):
        value = value.__dict__[part] if isinstance(value, type) else getattr(value, part)
    value = inspect.unwrap(getattr(value, "__func__", value))
    lines, first = inspect.getsourcelines(value)
    root = Path(__file__).resolve().parents[1]
    file = Path(inspect.getsourcefile(value) or "").resolve().relative_to(root)
    return {"name": qualified, "file": f"src/openv41/{file.as_posix()}", "lines": [first, first + len(lines) - 1]}
