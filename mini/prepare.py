"""From the corpus to what a run needs: a vocabulary, a configuration, token files.

    python mini/prepare.py [--fit MIB] [--tokens N]

reads .corpus/*.jsonl, and writes .corpus/model/ (configuration and tokenizer), train.bin.xz, validation.bin.xz, and
.corpus/prepared.json, what is in them. The vocabulary is a byte-level BPE of 4,096 ids, markers included, trained on a
part of the training text. `--fit` and `--tokens` bound the training tokens by the size of their file and by number:
documents are taken by a hash of their path, so a smaller set is part of every larger one, and all packages are in it.
"""

import argparse
import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openv41.config import Config, engram_primes
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.train.data import XZ
from openv41.weights.tiny import SPECIAL, train_tokenizer

FOLDER = Path(".corpus")
VOCABULARY = 4096
SAMPLE = 24 << 20
"""Bytes of text that the vocabulary is trained on."""
HELD = 2 << 20
"""Bytes that the packer may hold back, packed: it gives what it has in blocks of at most 2 MiB."""


def mini_config(compressed_vocab: int) -> Config:
    """openv41-mini: all roles, n-gram memory, experts, draft and tower of the release, in 23 MB as stored."""
    primes = engram_primes(2, 3, 2, 4000)
    return Config.released().replace(
        vocab_size=VOCABULARY, dim=256, moe_inter_dim=160, n_layers=9, n_mtp_layers=3,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0), kv_source_layers=(1, 4), index_source_layers=(1, 4, 6, 8),
        candidate_source_layer=4, candidate_topk_blocks=64, candidate_block_size=8, index_topk=64, index_n_heads=4,
        index_head_dim=32, n_heads=8, head_dim=64, rope_head_dim=32, q_lora_rank=128, o_groups=2, o_lora_rank=128,
        window_size=128, n_routed_experts=12, n_activated_experts=2, original_seq_len=2048, rope_factor=16,
        engram_layer_ids=(1, 3), engram_n_heads=2, engram_head_dim=32, engram_vocab_size=4000,
        engram_compressed_vocab_size=compressed_vocab,
        engram_num_embeddings=tuple(sum(map(sum, layer)) for layer in primes),
        vision_n_layers=2, vision_dim=64, vision_n_heads=2, vision_inter_dim=128, image_token_id=VOCABULARY - 1,
        dspark_target_layer_ids=(6, 7, 8), dspark_markov_rank=64, dspark_noise_token_id=VOCABULARY - 2,
        dspark_n_routed_experts=4, dspark_n_activated_experts=1,
    )  # fmt: skip


def read(name: str) -> Iterator[dict[str, Any]]:
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def place(document: dict[str, Any]) -> int:
    """A number that follows from package and path alone: documents are taken in its order."""
    return zlib.crc32(f"{document['package']}/{document['path']}".encode())


def in_order(documents: Iterable[dict[str, Any]], size: int) -> list[str]:
    """Texts of the documents with the lowest numbers, together `size` bytes or all."""
    ordered = sorted(((place(one), one["text"]) for one in documents), key=lambda pair: pair[0])
    taken, total = [], 0
    for _, text in ordered:
        if total >= size:
            break
        taken.append(text)
        total += len(text.encode())
    return taken


def tokens_of(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """Documents as ids, begin and end id around. Markers that a text spells are letters like others."""
    for text in texts:
        yield [*tokenizer.encode(text, markers=False), tokenizer.special.eos]


def write_fitting(path: Path, documents: Iterable[list[int]], most_tokens: int, most_bytes: int) -> tuple[int, int]:
    """A packed token file of the first documents, within both bounds: how many documents, and how many tokens."""
    packer = lzma.LZMACompressor(lzma.FORMAT_XZ, filters=XZ)
    count = tokens = written = 0
    with path.open("wb") as file:
        for ids in documents:
            # What the packer still holds back is less than `HELD` once it is packed.
            if tokens + len(ids) > most_tokens or written + HELD > most_bytes:
                break
            written += file.write(packer.compress(np.asarray(ids, "<u2").tobytes()))
            count, tokens = count + 1, tokens + len(ids)
        written += file.write(packer.flush())
    if written > most_bytes:
        raise ValueError(f"{path} has {written} bytes instead of {most_bytes}: raise HELD")
    return count, tokens


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fit", type=float, default=36.0, metavar="MIB", help="of train.bin.xz, at most (default: 36)")
    parser.add_argument("--tokens", type=int, default=10**9, metavar="N", help="for training, at most (default: any)")
    args = parser.parse_args(argv)
    try:
        texts = in_order(read("train"), 8 * args.tokens)
        held = [one["text"] for one in read("validation")]
    except OSError as error:
        missing = f"{error.filename}: {error.strerror}"
        print(f"prepare: error: {missing}; python mini/corpus.py build makes it", file=sys.stderr)
        return 2
    backend = train_tokenizer(VOCABULARY, sample(texts))
    tokenizer = Tokenizer(backend, SPECIAL)
    config = mini_config(int(compress_vocabulary(tokenizer, VOCABULARY).max()) + 1)
    model = FOLDER / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
    (model / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
    (model / "config.json").write_text(json.dumps(config.to_hf(SPECIAL), indent=2), encoding="utf-8")
    prepared = {
        name: written(tokenizer, FOLDER / f"{name}.bin.xz", some, *bounds)
        for name, some, bounds in (
            ("validation", held, (10**9, 1 << 30)), ("train", texts, (args.tokens, int(args.fit * 2**20))),
        )
    }  # fmt: skip
    (FOLDER / "prepared.json").write_text(json.dumps(prepared, indent=2) + "\n")
    return 0


def written(tokenizer: Tokenizer, path: Path, texts: list[str], most_tokens: int, most_bytes: int) -> dict[str, int]:
    """Write one file of tokens; what is in it."""
    count, tokens = write_fitting(path, tokens_of(tokenizer, texts), most_tokens, most_bytes)
    text = sum(len(text.encode()) for text in texts[:count])
    print(f"{path}: {count:,} documents, {tokens:,} tokens, {text / tokens:.3f} bytes a token, "
          f"{path.stat().st_size:,} bytes")  # fmt: skip
    return {"documents": count, "tokens": tokens, "bytes": text, "file_bytes": path.stat().st_size}


def sample(texts: Iterable[str]) -> Iterator[str]:
    """The first texts, line by line, `SAMPLE` bytes of them."""
    total = 0
    for text in texts:
        if total > SAMPLE:
            return
        total += len(text.encode())
        yield from text.splitlines(keepends=True)


if __name__ == "__main__":
    sys.exit(main())
