"""Pictures in prompts: mixed, cut anywhere, kept and forked, a sequence is the same computation.

Under `ReferenceOps` with published numerics: the same bits.
"""

import pytest
import torch
from torch import Tensor

from openv41.errors import InputError
from openv41.model.transformer import Transformer
from openv41.ops import choose
from openv41.state import Cache, Picture, Step
from tests.small import picture_of, readable, seeing_config, small_model, tokens

CONFIG = seeing_config()
RATIO = CONFIG.vision_downsample_ratio


@pytest.fixture
def model(seed: int) -> Transformer:
    return small_model(CONFIG, choose("cpu", "reference"), seed)


class Prompt:
    """Ids, image marks and features of text with pictures in it: `parts` are counts of text tokens, and pictures."""

    def __init__(self, model: Transformer, parts: list[int | Picture], seed: int) -> None:
        self.ids, self.image, self.features = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool), []
        for place, part in enumerate(parts):
            if isinstance(part, Picture):
                new = torch.full((part.tokens(RATIO),), CONFIG.image_token_id)
                self.features += model.see([part])[0].unbind(0)
            else:
                new = tokens(CONFIG, part, seed + place)
            self.ids = torch.cat((self.ids, new))
            self.image = torch.cat((self.image, torch.full((len(new),), isinstance(part, Picture))))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, some: slice) -> Tensor | None:
        """The features of the image tokens among some of the positions."""
        first, count = int(self.image[: some.start].sum()), int(self.image[some].sum())
        return torch.stack(self.features[first : first + count]) if count else None


def run(model: Transformer, prompts: list[Prompt], cuts: list[list[int]], cache: Cache, prefill="halo") -> list[Tensor]:
    """Logits of all tokens, or of each prompt's last one in half-depth prefill; call r holds the r-th piece of each."""
    logits: list[list[Tensor]] = [[] for _ in prompts]
    slots = [cache.open() for _ in prompts]
    wanted = "all" if prefill == "full" else "last"
    for turn in range(max(map(len, cuts))):
        here = [i for i in range(len(prompts)) if turn < len(cuts[i])]
        pieces = [slice(sum(cuts[i][:turn]), sum(cuts[i][: turn + 1])) for i in here]
        features = [rows for i, piece in zip(here, pieces, strict=True) if (rows := prompts[i].rows(piece)) is not None]
        step = cache.step(
            [(slots[i], prompts[i].ids[piece]) for i, piece in zip(here, pieces, strict=True)], wanted,
            torch.cat([prompts[i].image[piece] for i, piece in zip(here, pieces, strict=True)]),
            {slots[i]: len(prompts[i]) for i in here}, torch.cat(features) if features else None,
        )  # fmt: skip
        output = model(step, cache, prefill)
        if wanted == "all":
            for i, part in zip(here, output.logits.split([run.length for run in step.runs]), strict=True):
                logits[i].append(part)
        else:
            ready = [i for i in here if cache.length(slots[i]) == len(prompts[i])]
            for i, row in zip(ready, output.logits, strict=True):
                logits[i].append(row.unsqueeze(0))
    return [torch.cat(parts) for parts in logits]


def fresh(prompts: list[Prompt], slack: int = 0) -> Cache:
    return Cache(CONFIG, 2 * len(prompts), sum(map(len, prompts)) + 64, slack)


@torch.no_grad()
def test_a_ragged_batch_of_text_and_pictures_is_each_alone(model: Transformer, seed: int) -> None:
    small, wide, tall = (picture_of(CONFIG, *grid, seed + i) for i, grid in enumerate([(2, 3), (3, 16), (9, 4)]))
    prompts = [
        Prompt(model, parts, seed + 10 * number)
        for number, parts in enumerate([[7], [3, small, 4], [wide], [2, tall, small, 1, wide, 5], [1, small]])
    ]
    whole = [[len(prompt)] for prompt in prompts]
    for prefill in ("full", "halo"):
        together = run(model, prompts, whole, fresh(prompts), prefill)
        for prompt, logits in zip(prompts, together, strict=True):
            (alone,) = run(model, [prompt], [[len(prompt)]], fresh([prompt]), prefill)
            assert torch.equal(logits, alone)


@torch.no_grad()
def test_a_prompt_cut_at_any_place_is_the_whole_one(model: Transformer, seed: int) -> None:
    """Before, at either end of, and inside a picture; what the cache keeps is the same as well."""
    prompt = Prompt(model, [4, picture_of(CONFIG, 4, 5, seed), 3, picture_of(CONFIG, 1, 1, seed + 1), 5], seed)
    cache = fresh([prompt])
    (whole,) = run(model, [prompt], [[len(prompt)]], cache, "full")
    kept = readable(cache, 0)
    assert prompt.image.nonzero().flatten().tolist() == [*range(4, 12), *range(15, 19)]
    for border in (3, 4, 5, 7, 8, 11, 12, 17, 19):  # of the first picture, 7 and 10 are newlines
        cache = fresh([prompt])
        (pieces,) = run(model, [prompt], [[border, len(prompt) - border]], cache, "full")
        assert torch.equal(pieces, whole), border
        for what, rows in readable(cache, 0).items():
            assert torch.equal(rows, kept[what]), (border, what)
    (single,) = run(model, [prompt], [[1] * len(prompt)], fresh([prompt]), "full")
    assert torch.equal(single, whole)
    for cuts in ([24], [6, 18], [5, 5, 5, 5, 4]):
        (last,) = run(model, [prompt], [cuts], fresh([prompt]))
        assert torch.equal(last, whole[-1:])


@torch.no_grad()
def test_a_picture_is_kept_by_rewind_and_fork(model: Transformer, seed: int) -> None:
    prompt = Prompt(model, [3, picture_of(CONFIG, 3, 6, seed)], seed)
    more = tokens(CONFIG, 6, seed + 50)
    cache = fresh([prompt], slack=3)
    run(model, [prompt], [[len(prompt)]], cache, "full")
    twin = cache.fork(0)
    wanted = model(cache.step([(0, more)], "all"), cache).logits
    assert torch.equal(model(cache.step([(twin, more)], "all"), cache).logits, wanted)
    cache.rewind(0, len(prompt) + 3)
    assert torch.equal(model(cache.step([(0, more[3:])], "all"), cache).logits, wanted[3:])


@torch.no_grad()
def test_a_rewind_into_a_picture_takes_its_rows_again(model: Transformer, seed: int) -> None:
    prompt = Prompt(model, [3, picture_of(CONFIG, 3, 6, seed), 1], seed)
    cache = fresh([prompt], slack=3)
    (whole,) = run(model, [prompt], [[len(prompt)]], cache, "full")
    again = slice(len(prompt) - 3, len(prompt))
    cache.rewind(0, again.start)
    step = cache.step([(0, prompt.ids[again])], "all", prompt.image[again], features=prompt.rows(again))
    assert torch.equal(model(step, cache).logits, whole[again])


@torch.no_grad()
def test_what_is_seen_is_the_picture_not_its_ids(model: Transformer, seed: int) -> None:
    """Another picture of the same shape changes all that follows it, and nothing before."""
    one, other = (Prompt(model, [3, picture_of(CONFIG, 4, 5, seed + i), 4], seed) for i in range(2))
    assert torch.equal(one.ids, other.ids)
    (a,), (b,) = (run(model, [each], [[len(each)]], fresh([each]), "full") for each in (one, other))
    assert torch.equal(a[:4], b[:4]) and bool((a[4:] != b[4:]).any(1).all())  # the start is learned, the same for all


@torch.no_grad()
def test_ngrams_and_routers_treat_pictures_apart(model: Transformer, seed: int) -> None:
    """With features that are the very embeddings of the ids, the marks alone make the difference."""
    ids = tokens(CONFIG, 12, seed)
    image = torch.zeros(12, dtype=torch.bool)
    image[4:7] = True
    features = model.embed.weight[ids[4:7]]
    text = model(Step.pack([(0, 0, ids)], "all")).logits
    marked = model(Step.pack([(0, 0, ids)], "all", image)).logits
    assert torch.equal(model(Step.pack([(0, 0, ids)], "all", image, features=features)).logits, marked)
    assert torch.equal(marked[:4], text[:4]) and not torch.equal(marked[4:], text[4:])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_features_must_be_as_many_as_the_image_tokens(count: int) -> None:
    image = torch.tensor([False, True, True, True, False])
    with pytest.raises(InputError, match=f"3 tokens are marked as image and {count} rows"):
        Step.pack([(0, 0, [1] * 5)], image=image, features=torch.zeros(count, CONFIG.dim))
    with pytest.raises(InputError, match="0 tokens are marked"):
        Step.pack([(0, 0, [1] * 5)], features=torch.zeros(3, CONFIG.dim))
