"""The card of a trained model: every figure of docs/mini.md, measured and written.

    python mini/card.py MODEL RUN            all of them, then the page
    python mini/card.py NAME [MODEL] [RUN]   one of them: it is printed, and kept in mini/results/NAME.json
    python mini/card.py page                 docs/mini.md from the figures that are kept

    sizes        MODEL   parameters and bytes by component
    data                 packages, licences, documents, tokens
    training     RUN     steps, tokens, time, device, curve
    bits         MODEL   bits per byte of the measured documents
    compressors          gzip, bz2, xz on the same bytes
    ngram        MODEL   an n-gram model of the same training tokens, on the same bytes (MODEL for its vocabulary)
    positions    MODEL   bits per byte by position and by length of context
    copying      MODEL   what is read once and found again, by distance
    without      MODEL   bits per byte with a part switched off
    recall       MODEL   what the indexers find
    drafts       MODEL   tokens a round
    validity     MODEL   sampled completions that are Python

Figures of a model carry a digest of its weights; a page of figures of two models is refused. Ablations are trained by
mini/ablate.py. MODEL is a model folder, RUN the folder of a run. The texts are those that mini/corpus.py builds.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ablate
from corpus import read_record
from figures import compressors, copying, drafts, indexers, likelihood, ngram, sizes, texts, training, validity, without

from openv41.api import Assistant, load
from openv41.config import Config
from openv41.errors import InputError, OpenV41Error
from openv41.inputs.tokenizer import Tokenizer
from openv41.train.data import read_files

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "mini.md"
RESULTS = HERE / "results"
OF_MODEL = ("sizes", "bits", "positions", "copying", "without", "recall", "drafts", "validity")
"""Figures that carry the digest of a model."""


@dataclass
class Subject:
    """What is measured, and how much of it."""

    model: Path | None
    run: Path | None
    corpus: Path
    results: Path
    size: int = 400_000
    documents: int = 6
    samples: int = 200
    prompts: int = 16
    tokens: int | None = None
    edges: Sequence[int] = likelihood.EDGES
    contexts: Sequence[int] = likelihood.CONTEXTS
    device: str = "cpu"
    threads: int | None = None
    loaded: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        if self.model is None:
            raise InputError("this figure is of a model: name its folder")
        return self.model

    @cached_property
    def assistant(self) -> Assistant:
        return load(self.folder, self.device, threads=self.threads)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.open(self.folder)

    @cached_property
    def digest(self) -> str:
        """Of all weights, in the order of their files."""
        found = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            found.update(path.read_bytes())
        return found.hexdigest()[:16]

    @cached_property
    def held_out(self) -> list[dict[str, Any]]:
        return texts.held_out(self.corpus)

    @cached_property
    def measured(self) -> list[str]:
        """The documents that model, n-grams and compressors are measured on."""
        return texts.some(self.held_out, self.size)

    @property
    def nbytes(self) -> int:
        return sum(len(text.encode()) for text in self.measured)

    def all_documents(self) -> Any:
        return texts.encoded(self.tokenizer, [one["text"] for one in self.held_out])


# The figures


def sizes_of(s: Subject) -> dict[str, Any]:
    return sizes.measure(Config.from_json(s.folder / "config.json"), s.folder)


def data_of(s: Subject) -> dict[str, Any]:
    return training.data(read_record(), training.prepared(s.corpus))


def training_of(s: Subject) -> dict[str, Any]:
    if s.run is None:
        raise InputError("this figure is of a run: name its folder")
    training.curve(s.run, s.results)
    return training.run(s.run)


def bits_of(s: Subject) -> dict[str, Any]:
    context = s.edges[-1]
    return likelihood.whole(s.assistant.transformer, texts.encoded(s.tokenizer, s.measured), s.nbytes, context)


def compressors_of(s: Subject) -> dict[str, Any]:
    return compressors.measure(s.measured)


def ngram_of(s: Subject) -> dict[str, Any]:
    vocabulary = Config.from_json(s.folder / "config.json").vocab_size
    train = read_files([str(s.corpus / "train.bin*")], s.tokenizer, vocabulary)
    test = texts.encoded(s.tokenizer, s.measured)
    return ngram.measure(train, test, s.nbytes, vocabulary, s.tokenizer.special.bos)


def positions_of(s: Subject) -> dict[str, Any]:
    model, corpus = s.assistant.transformer, s.all_documents()
    found = {
        "positions": likelihood.positions(model, s.tokenizer, corpus, s.documents, s.edges),
        "contexts": likelihood.contexts(model, s.tokenizer, corpus, s.documents, s.contexts),
    }
    likelihood.draw(found, s.results / "positions")
    return found


def copying_of(s: Subject) -> dict[str, Any]:
    config, special = s.assistant.config, s.tokenizer.special
    ids = range(1 + max(special.bos, special.eos, special.pad), config.image_token_id)
    between = [gap for gap in copying.BETWEEN if gap + 2 * copying.PASSAGE <= s.edges[-1]]
    return copying.measure(s.assistant.transformer, ids, config.window_size, s.documents, between)


def without_of(s: Subject) -> dict[str, Any]:
    edges = without.EDGES if without.EDGES[-1] <= s.edges[-1] else s.edges
    return without.measure(s.assistant.transformer, s.tokenizer, s.all_documents(), s.documents, edges)


def recall_of(s: Subject) -> dict[str, Any]:
    pieces = likelihood.long_ones(s.all_documents(), s.edges[-1], max(1, s.documents // 3))
    return indexers.measure(s.assistant.transformer, pieces)


def drafts_of(s: Subject) -> dict[str, Any]:
    prompts = [task.prompt for task in validity.tasks(s.held_out, s.prompts)]
    return drafts.measure(s.assistant, prompts, s.tokens or 96)


def validity_of(s: Subject) -> dict[str, Any]:
    return validity.measure(s.assistant, s.held_out, s.samples, s.tokens or validity.TOKENS)


FIGURES: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "sizes": sizes_of, "data": data_of, "training": training_of, "bits": bits_of, "compressors": compressors_of,
    "ngram": ngram_of, "positions": positions_of, "copying": copying_of, "without": without_of, "recall": recall_of,
    "drafts": drafts_of, "validity": validity_of,
}  # fmt: skip


def measure(name: str, subject: Subject) -> dict[str, Any]:
    """One figure, kept among the results."""
    found = FIGURES[name](subject)
    if name in OF_MODEL:
        found["weights"] = subject.digest
    subject.results.mkdir(parents=True, exist_ok=True)
    (subject.results / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


# The page


def beside(results: dict[str, Any]) -> str:
    """Bits per byte of the same bytes by all that was measured on them."""
    bits, packed, grams = (results[name] for name in ("bits", "compressors", "ngram"))
    if len({one["bytes"] for one in (bits, packed, grams)}) != 1:
        raise InputError("bits, compressors and ngram were measured on different bytes: measure them anew")
    head = f"| {bits['bytes']:,} bytes, {bits['documents']} documents | bits per byte |"
    model = f"| openv41-mini, {bits['tokens']:,} tokens | {bits['bits_per_byte']:.3f} |"
    return "\n".join([head, "|---|---|", model, ngram.row(grams), *compressors.rows(packed)])


POSITIONS = "\n\n![Bits per byte by position and by length of context](../mini/results/positions.svg)"

PARTS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], str]]] = {
    "sizes": (("sizes",), lambda r: sizes.table(r["sizes"])),
    "data": (("data",), lambda r: training.data_table(r["data"])),
    "training": (("training",), lambda r: training.run_table(r["training"])),
    "bits": (("bits", "compressors", "ngram"), beside),
    "positions": (("positions",), lambda r: likelihood.table(r["positions"]) + POSITIONS),
    "copying": (("copying",), lambda r: copying.table(r["copying"])),
    "without": (("without",), lambda r: without.table(r["without"])),
    "recall": (("recall",), lambda r: indexers.table(r["recall"])),
    "drafts": (("drafts",), lambda r: drafts.table(r["drafts"])),
    "validity": (("validity",), lambda r: validity.table(r["validity"])),
    "ablations": (("ablations",), lambda r: ablate.table(r["ablations"])),
}
"""Parts of the page between markers: the results that each is made of, and its table."""

MISSING = "*Not measured yet.*"


def page(text: str, results: dict[str, Any]) -> str:
    """The page with every part filled from the results; a part that lacks one says that it is not measured yet."""
    digests = {name: results[name]["weights"] for name in OF_MODEL if name in results}
    if len(set(digests.values())) > 1:
        told = ", ".join(f"{name} {digest}" for name, digest in digests.items())
        raise InputError(f"these figures are of different models: {told}; measure them anew")
    for part, (needed, render) in PARTS.items():
        body = render(results) if all(name in results for name in needed) else MISSING
        marked = re.compile(rf"(<!-- {part} -->\n).*?(\n<!-- /{part} -->)", re.S)
        text, count = marked.subn(lambda found, body=body: found[1] + body + found[2], text)
        if count != 1:
            raise InputError(f"the page must have the part {part} once, found {count} times")
    return text


def write_page(path: Path, folder: Path) -> None:
    results = {one.stem: json.loads(one.read_text()) for one in sorted(folder.glob("*.json"))}
    path.write_text(page(path.read_text(encoding="utf-8"), results), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = options().parse_intermixed_args(argv)
    name, *rest = args.what
    names = [name] if name in FIGURES else [] if name == "page" else list(FIGURES)
    folders = rest if name in (*FIGURES, "page") else args.what
    if len(folders) > 2 or (name not in (*FIGURES, "page") and len(folders) != 2):
        options().error("give MODEL and RUN, or the name of a figure and what it is of, or page: see --help")
    own = name == "training"  # the one figure whose only folder is a run
    model, run = (None, folders[-1]) if own and folders else (folders + [None, None])[:2]
    subject = Subject(
        Path(model) if model else None, Path(run) if run else None, args.corpus, args.results, args.bytes,
        args.documents, args.samples, args.prompts, args.tokens, device=args.device, threads=args.threads,
    )  # fmt: skip
    try:
        for one in names:
            found = measure(one, subject)
            print(json.dumps({one: found}, indent=2))
        if name not in FIGURES:
            write_page(args.page, args.results)
    except (OpenV41Error, OSError) as error:
        print(f"card: error: {error}", file=sys.stderr)
        return 2
    return 0


def options() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", nargs="+", metavar="MODEL RUN | NAME [MODEL] [RUN] | page")
    parser.add_argument("--bytes", type=int, default=Subject.size, help="of text for bits, compressors, ngram")
    parser.add_argument("--documents", type=int, default=Subject.documents, help="of positions; recall: a third")
    parser.add_argument("--samples", type=int, default=Subject.samples, help="completions for validity")
    parser.add_argument("--prompts", type=int, default=Subject.prompts, help="for drafts")
    parser.add_argument("--tokens", type=int, help="of a completion, for drafts (96) and validity (256)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--corpus", type=Path, default=texts.CORPUS, metavar="DIR")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
