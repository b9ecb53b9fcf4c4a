"""Loading is strict, and what the assistant does agrees with the parts that it is made of."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import openv41
from openv41 import api
from openv41.api import Assistant, load
from openv41.config import SpecialIds
from openv41.errors import CheckpointError, ConfigError, InputError, OpsError
from openv41.generate.loop import Generation
from openv41.inputs.image import read_picture
from openv41.inputs.tokenizer import Tokenizer, compress_vocabulary
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Step
from openv41.texts import Piece, Prompt, Stream
from openv41.weights.load import Checkpoint, load_into
from openv41.weights.tiny import write_tiny
from tests.drafts import Oracle, drafted_by

PROMPTS = ["def fibonacci(n):", "What is a token?", "Où"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint. Read only: break a copy."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Assistant:
    return load(tiny, ops="reference")


@pytest.fixture(scope="module")
def fast(tiny: Path) -> Assistant:
    return load(tiny)


@pytest.fixture(scope="module")
def free(reference: Assistant) -> list[Piece]:
    """What the reference says to the first prompt, nothing stopping it."""
    return list(reference.stream(PROMPTS[0], max_new_tokens=8))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


# Loading


def test_a_model_made_on_no_device_is_the_model_made_in_memory(tiny: Path, reference: Assistant) -> None:
    config, ops = reference.config, choose("cpu", "reference")
    plain = Transformer(config, ops)
    load_into(plain, Checkpoint.open(tiny))
    assert plain.lookback is not None
    plain.lookback.token_map = compress_vocabulary(Tokenizer.open(tiny), config.vocab_size)
    step = Step.pack([(0, 0, list(range(3, 30)))], wanted="all")
    with torch.no_grad():
        assert torch.equal(plain(step).logits, reference.transformer(step).logits)
    assert not any(tensor.is_meta for tensor in (*reference.transformer.parameters(), *reference.transformer.buffers()))


@pytest.mark.parametrize("name", ["mtp.0.main_norm.weight", "vision.norm.weight", "image_end"])
def test_no_tensor_is_left_out(copy: Path, name: str) -> None:
    index = copy / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"].pop(name)
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=name):
        load(copy)


def test_a_tokenizer_that_compresses_otherwise_is_refused(copy: Path) -> None:
    path = copy / "tokenizer.json"
    document = json.loads(path.read_text())
    # Two tokens that coincided, or did not, now spell something else.
    vocabulary = document["model"]["vocab"]
    word = next(token for token in vocabulary if token.startswith("Ġ") and token[1:] in vocabulary)
    vocabulary[word + "qqq"] = vocabulary.pop(word)
    document["model"]["merges"] = [pair for pair in document["model"]["merges"] if "".join(pair) != word]
    document["model"]["merges"] = [pair for pair in document["model"]["merges"] if word not in pair]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="engram_compressed_vocab_size is"):
        load(copy)


def test_what_is_no_model_folder_is_refused(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CheckpointError, match="no model folder at"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no config.json"):
        load(tmp_path)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="no tokenizer at"):
        load(copy)


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        (dict(device="banana"), InputError, "device must be"),
        (dict(device="cuda:99"), InputError, "device must be one that torch sees"),
        (dict(ops="swift"), OpsError, "unknown set of ops"),
        (dict(ops="reference", weights="cached"), InputError, "must go with the cpu or fast set"),
        (dict(threads=0), InputError, "threads must be a whole number, 1 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(tiny: Path, options: dict, error: type, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        load(tiny, **options)


def test_the_cpu_set_keeps_weights_if_they_take_a_quarter_of_the_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = api.dequantised_bytes(Checkpoint.open(tiny))
    for free, caches in [(4 * size, True), (4 * size - 1, False)]:
        monkeypatch.setattr(api, "free_memory", lambda free=free: free)
        assert load(tiny).ops.caches is caches
    assert load(tiny, weights="fp32").ops.caches


def test_the_size_of_dequantised_weights_is_that_of_the_modules(tiny: Path, fast: Assistant) -> None:
    values = sum(
        parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)
        for name, parameter in fast.transformer.named_parameters()
        if parameter.dtype.itemsize == 1 and name.endswith("weight") and "engram.embed" not in name
    )
    assert api.dequantised_bytes(Checkpoint.open(tiny)) == values * (2 if api.native_bf16() else 4)


def test_plain_numerics_compute_in_float64(tiny: Path) -> None:
    plain = load(tiny, numerics="plain")
    assert plain.ops.dtype == torch.float64
    assert plain.generate(PROMPTS[2], max_new_tokens=2).tokens == 2


def test_threads_are_set(tiny: Path) -> None:
    before = torch.get_num_threads()
    try:
        load(tiny, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_progress_is_told(tiny: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load(tiny, progress=lambda *news: told.append(news))
    assert told[-1][1] == told[-1][2] and {name for name, _, _ in told} == Checkpoint.open(tiny).specs.keys()


def test_free_memory_is_a_number_of_bytes() -> None:
    assert api.free_memory() >= 0


# Generating


def test_a_completion_is_its_ids(reference: Assistant) -> None:
    done = reference.generate(PROMPTS[0], max_new_tokens=3)
    assert done.text == reference.tokenizer.decode(done.ids, special=False)
    assert (done.tokens, done.finish_reason) == (3, "length")
    assert done.prompt_tokens == len(reference.tokenizer.encode(PROMPTS[0]))  # with the begin id
    assert done.seconds > 0 and done.tokens_per_second == done.tokens / done.seconds


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 4}])
def test_a_batch_gives_what_each_prompt_gives_alone(reference: Assistant, options: dict) -> None:
    together = reference.generate(PROMPTS, max_new_tokens=3, **options)
    for place, (prompt, batched) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = reference.generate(Prompt(prompt, max_new_tokens=3, stream=place, **options))
        assert (alone.text, alone.ids) == (batched.text, batched.ids)


def test_the_pieces_add_up(reference: Assistant) -> None:
    stream = reference.stream(PROMPTS, max_new_tokens=4)
    pieces = list(stream)
    for place, completion in enumerate(stream.completions):
        own = [piece for piece in pieces if piece.sequence == place]
        assert "".join(piece.text for piece in own) == completion.text
        assert tuple(piece.id for piece in own) == completion.ids
        assert [piece.finish_reason for piece in own] == [None] * 3 + ["length"]


def test_a_stop_text_may_straddle_tokens(reference: Assistant, free: list[Piece]) -> None:
    text = "".join(piece.text for piece in free)
    at = next(i for i in range(1, 6) if free[i].text.strip() and free[i + 1].text.strip())
    stop = free[at].text[-1] + free[at + 1].text[0]
    stream = reference.stream(PROMPTS[0], max_new_tokens=8, stop=[stop, "never"])
    shown = "".join(piece.text for piece in stream)
    [ended] = stream.completions
    assert shown == ended.text == text[: text.index(stop)]
    assert ended.finish_reason == "stop" and ended.ids == tuple(piece.id for piece in free[: len(ended.ids)])


def test_a_stop_text_across_the_border_of_a_draft(reference: Assistant, free: list[Piece]) -> None:
    """Whether its ids come from one draft, from two, or with a model's own id between them: the same pieces."""
    at = next(i for i in range(1, 6) if free[i].text.strip() and free[i + 1].text.strip())
    stop = free[at].text[-1] + free[at + 1].text[0]
    prompt = Prompt(PROMPTS[0], max_new_tokens=8, stop=stop)
    request = prompt.encode(reference.tokenizer, reference.config)
    text = [*request.ids, *[piece.id for piece in free]]
    pieces = []
    for right in (None, 0, 1, 2, 3, 5):
        oracle = Oracle([text], reference.config.vocab_size, lambda slot, round, right=right: right)
        speculation = None if right is None else drafted_by(oracle)
        eos = reference.tokenizer.special.eos
        generation = Generation(reference.transformer, [request], eos, speculation=speculation)
        pieces.append(list(Stream(reference.tokenizer, [prompt], generation)))
    assert pieces[0][-1].finish_reason == "stop"
    assert all(other == pieces[0] for other in pieces)


def test_drafts_change_no_text(reference: Assistant, free: list[Piece]) -> None:
    text = "".join(piece.text for piece in free)
    for draft in ("off", 2, 5):
        assert reference.generate(PROMPTS[0], draft=draft, max_new_tokens=8).text == text
    with pytest.raises(InputError, match="draft must be at most 5"):
        reference.stream(PROMPTS[0], draft=6)


def test_a_loaded_model_explains_its_parts(reference: Assistant) -> None:
    panel = reference.explain("attention", layer=6, position=100)
    parts = reference.transformer.layers[6].attn.parameters()
    held = sum(part.numel() for part in parts if part.dtype != torch.float8_e8m0fnu)
    assert panel.parameters["per_instance"] == held and "Attention · layer 6" in str(panel)
    with pytest.raises(InputError, match="layer must be 0 to 10"):
        reference.explain("attention", layer=11)


def test_a_stop_text_that_does_not_come_changes_nothing(reference: Assistant, free: list[Piece]) -> None:
    text = "".join(piece.text for piece in free)
    kept = reference.generate(PROMPTS[0], max_new_tokens=8, stop=text[-1] + "\0")
    assert (kept.text, kept.finish_reason) == (text, "length")


def test_the_end_id_ends_the_text_and_is_no_part_of_it(
    reference: Assistant, free: list[Piece], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(piece.id for piece in free)
    monkeypatch.setattr(reference.tokenizer, "special", SpecialIds(bos=0, eos=ids[3], pad=2))
    ended = reference.generate(PROMPTS[0], max_new_tokens=8)
    before = ids[: ids.index(ids[3])]
    assert (ended.ids, ended.finish_reason) == (before, "eos")
    assert ended.text == reference.tokenizer.decode(before)


def test_a_stream_that_is_closed_leaves_nothing_open(reference: Assistant) -> None:
    stream = reference.stream(PROMPTS)
    next(stream)
    stream.close()
    assert stream.generation.cache.lengths == [None] * 3
    assert list(stream) == []
    assert [completion.finish_reason for completion in stream.completions] == [None] * 3


def test_prompts_have_options_of_their_own(reference: Assistant) -> None:
    short, long = reference.generate([Prompt("a", max_new_tokens=1), Prompt("b", max_new_tokens=2)])
    assert (short.tokens, long.tokens) == (1, 2)
    with pytest.raises(InputError, match="max_new_tokens must be set in each Prompt"):
        reference.generate(Prompt("a"), max_new_tokens=2)
    with pytest.raises(InputError, match="at least 1 request"):
        reference.generate([])
    with pytest.raises(InputError, match="must not be empty"):
        reference.generate("")


def test_the_cpu_set_begins_as_the_reference_does(reference: Assistant, fast: Assistant) -> None:
    assert fast.ops.name == "cpu"
    for prompt in PROMPTS:
        assert fast.generate(prompt, max_new_tokens=2).ids == reference.generate(prompt, max_new_tokens=2).ids


# Scoring


def test_greedy_ids_are_the_likeliest_by_their_score(reference: Assistant) -> None:
    done = reference.generate(PROMPTS[1], max_new_tokens=1)
    text = PROMPTS[1]
    scored = reference.score(text, top=1)
    assert [token.id for token in scored.tokens] == reference.tokenizer.encode(text)[1:]
    step = Step.pack([(0, 0, reference.tokenizer.encode(text))])
    with torch.no_grad():
        assert int(reference.transformer(step).logits.argmax()) == done.ids[0]
    assert all(token.logprob <= token.likeliest[0].logprob for token in scored.tokens)


def test_a_score_in_chunks_is_the_score_at_once(reference: Assistant, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference.score(PROMPTS[0])
    scoring = api.score
    monkeypatch.setattr(api, "score", lambda *arguments: scoring(*arguments, chunk=3))
    assert reference.score(PROMPTS[0]) == whole


def test_bits_per_byte_counts_bytes_of_utf8(reference: Assistant) -> None:
    score = reference.score("Où est-il?")
    assert score.bytes == len("Où est-il?".encode()) == 11
    assert score.bits_per_byte == pytest.approx(-sum(t.logprob for t in score.tokens) / math.log(2) / 11)
    assert score.perplexity == pytest.approx(math.exp(-score.logprob / len(score.tokens)))


def test_an_empty_text_has_no_score(reference: Assistant) -> None:
    with pytest.raises(InputError, match="must not be empty"):
        reference.score("")


# The door


def test_the_door_names_what_it_has() -> None:
    assert set(openv41.__all__) <= set(dir(openv41))
    for name in openv41.__all__:
        assert getattr(openv41, name) is not None
    assert openv41.load is load and openv41.errors.InputError is openv41.InputError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = openv41.nothing


def test_the_door_opens_without_torch() -> None:
    code = "import sys, openv41; dir(openv41); openv41.Config; openv41.plan_layers; assert 'torch' not in sys.modules"
    source = str(Path(__file__).parent.parent / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": source})


# Images


def test_images_in_a_prompt(reference: Assistant, fast: Assistant, tmp_path: Path) -> None:
    """A path, bytes and a picture made before are the same image; another image is another prompt."""
    noise = Image.effect_noise((70, 50), 60)
    noise.save(tmp_path / "noise.png")
    path, data = tmp_path / "noise.png", (tmp_path / "noise.png").read_bytes()
    made = read_picture(path, fast.config)
    sources = [path, str(path), data, made]
    prompts = [Prompt("What is <image>?", max_new_tokens=4, images=[source]) for source in sources]
    completions = fast.generate(prompts)
    assert len({completion.text for completion in completions}) == 1
    assert completions[0].prompt_tokens == len(fast.tokenizer.encode("What is ")) + made.tokens(3) + 1
    alone = fast.generate(prompts[3])
    assert alone.prompt_tokens == completions[3].prompt_tokens
    text = Prompt("What is <image>?", max_new_tokens=4)
    assert fast.generate(text).prompt_tokens == len(fast.tokenizer.encode(text.text))


def test_a_bad_image_is_told_before_anything_runs(fast: Assistant, tmp_path: Path) -> None:
    good = Prompt("plain", max_new_tokens=2)
    with pytest.raises(InputError, match="nowhere.png cannot be read"):
        fast.stream([good, Prompt("<image>", images=[tmp_path / "nowhere.png"])])
    with pytest.raises(InputError, match="the image is no image that can be read"):
        fast.stream(Prompt("<image>", images=[b"text"]))
    assert fast.generate(good).tokens == 2


@pytest.mark.parametrize(("text", "count"), [("<image>", 0), ("<image><image>", 1), ("none", 1)])
def test_images_are_as_many_as_their_places(text: str, count: int) -> None:
    with pytest.raises(InputError, match=f"got {text.count('<image>')} of them and {count} images"):
        Prompt(text, images=[b""] * count)
