"""`Step`: one call, `n` tokens of any mixture of sequences, and what can be worked out from their positions alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from openv41.errors import InputError


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one slot: positions `start` to `start + length - 1`, in rows `first`, ... of the step."""

    slot: int
    start: int
    length: int
    first: int
    prompt: int = 0
    """Where the prompt ends that this run is a piece of; 0 if it ends with the run."""

    @property
    def stop(self) -> int:
        """The position behind the last token that is known to come: the prompt's end, or the run's."""
        return max(self.end, self.prompt)

    @property
    def end(self) -> int:
        return self.start + self.length

    def pieces(self, size: int) -> Iterator[slice]:
        """The run's rows of the step, at most `size` at a time."""
        last = self.first + self.length
        return (slice(first, min(first + size, last)) for first in range(self.first, last, size))


@dataclass(frozen=True)
class Groups:
    """The groups of `ratio` tokens that a step completes: group `index[g]` of `slot[g]`, its tokens' positions."""

    slot: Int[Tensor, "g"]
    index: Int[Tensor, "g"]
    position: Int[Tensor, "g ratio"]
    token: Int[Tensor, "g"]
    """Row of the step whose token completes the group."""
    places: dict[Any, Int[Tensor, "g"]] = field(default_factory=dict, repr=False, compare=False)
    """Rows of a cache's tables, worked out once a step: see `Paged.places`."""

    @cached_property
    def first(self) -> Int[Tensor, "g"]:
        """The position of each group's first token: one tensor, by which angles are found again."""
        return self.index * self.position.shape[1]


@dataclass(frozen=True)
class Reach:
    """The tokens just before each run of a step, `back` of them at most, and where a joined table holds every token.

    In the table [history rows, then the step's own rows], position q of token t's slot lies in row `own[t] + q` from
    the run's start on, and in row `old[t] + q` before it.
    """

    slot: Int[Tensor, "history"]
    position: Int[Tensor, "history"]
    old: Int[Tensor, "n"]
    own: Int[Tensor, "n"]


@dataclass(frozen=True, eq=False)
class Step:
    """One call: `n` packed tokens. A prompt, a chunk, one decoded token a sequence, a draft, or all at once.

    Fields (int64): ids [n]; slot [n]; position [n]; start [n], the position at which the token's run starts; the runs;
    `wanted` [j], rows whose logits are asked for; `image` [n], true where the token is part of an image; `floor` [n],
    the first position whose window row the token may see (0 but in a halo, see `latest`). `replay`: the tokens have
    been run before, and their latents and index keys stand; only rings are to be written again. `ahead`: the tensors
    are those of a `Standing`, whose positions may move on by so many while the runs stay. `features` [i, dim]:
    the rows that stand for the image tokens, in their order, as `Transformer.see` makes them; None: their ids' own.
    Make one with `Step.pack` (or `Cache.step`, which knows the positions).
    """

    ids: Int[Tensor, "n"]
    slot: Int[Tensor, "n"]
    position: Int[Tensor, "n"]
    start: Int[Tensor, "n"]
    runs: tuple[Run, ...]
    wanted: Int[Tensor, "j"]
    image: Bool[Tensor, "n"]
    floor: Int[Tensor, "n"]
    replay: bool = False
    features: Float[Tensor, "i dim"] | None = None
    ahead: int = 0
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def pack(
        cls,
        parts: Iterable[tuple[int, int, Sequence[int] | Tensor]],
        wanted: Literal["last", "all", "none"] = "last",
        image: Bool[Tensor, "n"] | None = None,
        device: str | torch.device = "cpu",
        prompts: Mapping[int, int] | None = None,
        replay: bool = False,
        features: Float[Tensor, "i dim"] | None = None,
    ) -> "Step":
        """A step from (slot, start position, ids) parts, one a slot.

        `wanted`: "last" asks for the logits of each run's last token, "all" for every token's, "none" for none.
        `prompts`: for slots whose part is a piece of a longer prompt, the position at which the prompt ends. The
        upper layers then run only what can still matter there; "last" asks nothing of a piece that is not the last.
        Raises `InputError` for an empty part, a slot named twice, a negative start, nothing at all, features that are
        not as many as the image tokens, or a negative id, which would be read from the end of the vocabulary. Ids that
        lie on a device already are not looked at: to ask for one number would be to wait for it.
        """
        runs: list[Run] = []
        ids: list[Tensor] = []
        first = 0
        for slot, start, part in parts:
            piece = torch.as_tensor(part, dtype=torch.int64)
            if piece.dim() != 1 or piece.numel() == 0:
                raise InputError(f"a part of a step is a row of at least one token, got shape {tuple(piece.shape)}")
            if start < 0:
                raise InputError(f"a part's start position must be 0 or more, got {start}")
            if any(run.slot == slot for run in runs):
                raise InputError(f"slot {slot} has two parts in one step: join them, or take two steps")
            runs.append(Run(slot, start, piece.numel(), first, (prompts or {}).get(slot, 0)))
            ids.append(piece)
            first += piece.numel()
        if not runs:
            raise InputError("a step needs at least one part")
        if features is not None and (marked := 0 if image is None else int(image.sum())) != len(features):
            raise InputError(f"{marked} tokens are marked as image and {len(features)} rows of features are given")
        # Worked out on the host, and brought to the device at once: each way there takes as long as the next.
        lengths = [run.length for run in runs]
        start_of, slot_of = (np.repeat([getattr(run, name) for run in runs], lengths) for name in ("start", "slot"))
        position_of = np.concatenate([np.arange(run.start, run.end) for run in runs])
        slots, starts, positions = on_device((slot_of, start_of, position_of), device)
        if (host := [piece for piece in ids if piece.is_cpu]) and (least := int(torch.cat(host).min())) < 0:
            raise InputError(f"a token's id must be 0 or more, got {least}")
        if len({piece.device for piece in ids}) > 1:
            ids = [piece.to(device) for piece in ids]
        rows = torch.arange(first, device=device)
        asked = {
            "last": lambda: on_device(([r.first + r.length - 1 for r in runs if r.stop == r.end],), device)[0],
            "all": lambda: rows,
            "none": lambda: rows[:0],
        }[wanted]()
        return cls(
            ids=torch.cat(ids).to(device),
            slot=slots,
            position=positions,
            start=starts,
            runs=tuple(runs),
            wanted=asked,
            image=torch.zeros(first, dtype=torch.bool, device=device) if image is None else image,
            floor=starts if replay else torch.zeros_like(starts),  # a replay's rings are empty
            replay=replay,
            features=features,
        )

    def latest(self, reach: int) -> tuple["Step", Int[Tensor, "kept"]] | None:
        """The tokens among the last `reach` before each run's stop: a step of their own, and their rows of this one.

        They see no window row from before the first of them: that is the edge of a halo. None if no token is left.
        The step is for layers, whose streams hold the features already: it has none.
        """
        kept = [(run, min(run.length, max(0, run.end - (run.stop - reach)))) for run in self.runs]
        if all(count == run.length for run, count in kept):
            return self, torch.arange(len(self), device=self.device)
        runs: list[Run] = []
        rows = []
        for run, count in kept:
            if count:
                first = sum(r.length for r in runs)
                runs.append(replace(run, start=run.end - count, length=count, first=first))
                rows.append(torch.arange(run.first + run.length - count, run.first + run.length, device=self.device))
        if not runs:
            return None
        row = torch.cat(rows)
        cut = torch.cat([self.start.new_full((run.length,), max(0, run.stop - reach)) for run in runs])
        start = torch.cat([self.start.new_full((run.length,), run.start) for run in runs])
        place = self.start.new_full((len(self),), -1)
        place[row] = torch.arange(len(row), device=self.device)
        wanted = place[self.wanted]
        return Step(
            ids=self.ids[row],
            slot=self.slot[row],
            position=self.position[row],
            start=start,
            runs=tuple(runs),
            wanted=wanted[wanted >= 0],
            image=self.image[row],
            floor=torch.maximum(self.floor[row], cut),
            replay=self.replay,
        ), row

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @cached_property
    def longest(self) -> int:
        return max(run.length for run in self.runs)

    def stop_of_rows(self) -> Int[Tensor, "n"]:
        """For each token, its run's `stop`."""
        return torch.cat([self.start.new_full((run.length,), run.stop) for run in self.runs])

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, worked out once a step: forty layers ask for the same row numbers."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def reach(self, back: int) -> Reach:
        """Where to find the `back` tokens before each run, and all of the step's own."""
        return self.remember(("reach", back), lambda: self._reach(back))

    def _reach(self, back: int) -> Reach:
        before = np.array([min(run.start, back) for run in self.runs])
        start, first, slot, length = np.array([(r.start, r.first, r.slot, r.length) for r in self.runs]).T
        held = before.cumsum() - before  # rows of history before each run's own
        history = np.arange(before.sum()) + np.repeat(start - before - held, before)
        own = np.repeat(before.sum() + first - start, length)
        old = np.repeat(held - (start - before), length)
        return Reach(*on_device((np.repeat(slot, before), history, old, own), self.device))

    def window(self, width: int) -> Int[Tensor, "n w"]:
        """The positions that each token sees, oldest first: itself and up to `width - 1` before; -1 fills up behind."""
        return self.remember(("window", width), lambda: self._window(width))

    def _window(self, width: int) -> Int[Tensor, "n w"]:
        here = self.position.unsqueeze(1)
        seen = (here - width + 1).clamp_min(0) + torch.arange(width, device=self.device)
        return seen.masked_fill((seen > here) | (seen < self.floor.unsqueeze(1)), -1)

    def around(self, width: int) -> Int[Tensor, "n t"]:
        """The positions that each token of a draft sees: up to `width` before its run, oldest first, -1 behind to fill
        up; then its whole run, what comes after the token included. All runs have the same length."""
        start = self.start.unsqueeze(1)
        before = (start - width).clamp_min(0) + torch.arange(width, device=self.device)
        run = start + torch.arange(self.longest, device=self.device)
        return torch.cat((before.masked_fill(before >= start, -1), run), 1)

    def groups(self, ratio: int) -> Groups:
        """The groups of `ratio` tokens whose last token is in this step."""
        return self.remember(("groups", ratio), lambda: self._groups(ratio))

    def _groups(self, ratio: int) -> Groups:
        if self.ahead:
            return self._groups_of_all(ratio)
        start, end, first, slot = np.array([(r.start, r.end, r.first, r.slot) for r in self.runs]).T
        count = end // ratio - start // ratio
        before = count.cumsum() - count  # groups of the runs before
        index = np.arange(count.sum()) + np.repeat(start // ratio - before, count)
        token = (index + 1) * ratio - 1 + np.repeat(first - start, count)
        slots, indices, tokens = on_device((np.repeat(slot, count), index, token), self.device)
        member = (indices * ratio).unsqueeze(1) + torch.arange(ratio, device=self.device)
        return Groups(slots, indices, member, tokens)

    def _groups_of_all(self, ratio: int) -> Groups:
        """Every token's group, complete or not: see `Standing`."""
        index = self.position // ratio
        member = (index * ratio).unsqueeze(1) + torch.arange(ratio, device=self.device)
        return Groups(self.slot, index, member, torch.arange(len(self), device=self.device))

    def visible(self, ratio: int) -> Int[Tensor, "n"]:
        """Compressed positions that each token sees: position j is visible once its whole group is."""
        return self.remember(("visible", ratio), lambda: (self.position + 1) // ratio)


def on_device(rows: Sequence[Any], device: str | torch.device) -> list[Int[Tensor, "some"]]:
    """Rows of whole numbers as tensors on a device, brought there together."""
    arrays = [np.asarray(row, dtype=np.int64) for row in rows]
    whole = torch.from_numpy(np.concatenate(arrays)).to(device)
    return list(whole.split([len(array) for array in arrays]))
