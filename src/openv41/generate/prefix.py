"""Prefix reuse: a new prompt starts from the longest beginning that it shares with a prompt that was kept.

Latents and index keys of a shared beginning are shared, page by page. What is missing are the rings: a layer's window
holds the latest tokens of where the *kept* prompt ended, not of where the two part. They are made anew by a replay of
the latest tokens before that point, which writes rings only:

    exact    replays a halo, `window - 1` tokens for each layer and the window itself: what lies before cannot reach
             any row that is kept. Logits are those of a cold run, bit for bit under row-stable ops.
    bounded  replays the last `window` tokens only. Every layer then sees a window that starts there: an
             approximation, which costs one window however deep the model is.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from openv41.errors import InputError
from openv41.model.transformer import Halo, Transformer
from openv41.state import Cache, Step

Replay = Literal["exact", "bounded"]


@dataclass
class Node:
    """A stretch of token ids, and how prompts go on from its end."""

    stretch: tuple[int, ...] = ()
    then: dict[int, "Node"] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)
    """Slots that hold a prompt which goes through this whole stretch."""


class RadixIndex:
    """Kept prompts by their ids: a tree in which prompts share the nodes of what they share."""

    def __init__(self) -> None:
        self.root = Node()

    def add(self, ids: Sequence[int], slot: int) -> None:
        node, rest = self.root, tuple(ids)
        while rest:
            child = node.then.get(rest[0])
            if child is None:
                node.then[rest[0]] = Node(rest, slots={slot})
                return
            shared = _shared(child.stretch, rest)
            if shared < len(child.stretch):
                child = self._split(node, child, shared)
            child.slots.add(slot)
            node, rest = child, rest[shared:]

    def _split(self, parent: Node, child: Node, at: int) -> Node:
        head = Node(child.stretch[:at], {child.stretch[at]: child}, set(child.slots))
        child.stretch = child.stretch[at:]
        parent.then[head.stretch[0]] = head
        return head

    def remove(self, ids: Sequence[int], slot: int) -> None:
        node, rest = self.root, tuple(ids)
        while rest:
            child = node.then[rest[0]]
            child.slots.discard(slot)
            if not child.slots:
                del node.then[rest[0]]
                return
            node, rest = child, rest[len(child.stretch) :]

    def longest(self, ids: Sequence[int]) -> tuple[int, int | None]:
        """The length of the longest beginning of `ids` that a kept prompt has, and that prompt's slot."""
        node, rest, length, slot = self.root, tuple(ids), 0, None
        while rest and rest[0] in node.then:
            node = node.then[rest[0]]
            shared = _shared(node.stretch, rest)
            length, slot = length + shared, min(node.slots)
            if shared < len(node.stretch):
                break
            rest = rest[shared:]
        return length, slot


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))


class PrefixStore:
    """Prompts kept in slots of a cache, `limit` at most; the one unused for longest goes first.

    Of a prompt with an image what comes before it is kept: the ids of two images are the same.
    """

    def __init__(self, model: Transformer, cache: Cache, limit: int, replay: Replay = "exact") -> None:
        if limit < 1 or replay not in ("exact", "bounded"):
            raise InputError(f"a store keeps at least 1 prompt, by exact or bounded replay; got {limit} and {replay!r}")
        self.model, self.cache, self.limit, self.replay = model, cache, limit, replay
        self.index = RadixIndex()
        self.kept: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def keep(self, slot: int, ids: Sequence[int]) -> None:
        """Keep what a slot holds, the prompt `ids`, for later ones. The slot itself goes on as it likes."""
        if len(ids) != self.cache.length(slot):
            raise InputError(f"slot {slot} holds {self.cache.length(slot)} tokens, {len(ids)} ids were given")
        if self.model.vision is not None and self.model.config.image_token_id in ids:
            ids = ids[: list(ids).index(self.model.config.image_token_id)]
        if not ids:
            return
        if len(self.kept) == self.limit:
            self.drop(next(iter(self.kept)))
        held = self.cache.branch(slot, len(ids))
        self.kept[held] = tuple(ids)
        self.index.add(ids, held)

    def drop(self, held: int) -> None:
        self.index.remove(self.kept.pop(held), held)
        self.cache.close(held)

    def begin(self, ids: Sequence[int]) -> tuple[int, int]:
        """A fresh slot for the prompt `ids`, and how many of its tokens it holds already: run the others.

        At least one token is left to run, so that there are logits.
        """
        length, held = self.index.longest(ids)
        length = min(length, len(ids) - 1)
        if held is None or length <= 0:
            return self.cache.open(), 0
        self.kept.move_to_end(held)
        slot = self.cache.branch(held, length)
        try:
            self._replay(slot, ids[:length])
        except BaseException:
            self.cache.close(slot)
            raise
        return slot, length

    @torch.no_grad()
    def _replay(self, slot: int, ids: Sequence[int]) -> None:
        start = max(0, len(ids) - self.tokens_replayed())
        before = torch.tensor([[id, 0] for id in ids[max(0, start - self.cache.tail.size) : start]], dtype=torch.int64)
        if start:
            self.cache.tail.put(slot, start, before.to(self.cache.tail.table.device))
        part = (slot, start, list(ids[start:]))
        output = self.model(Step.pack([part], "none", device=self.cache.device, replay=True), self.cache)
        if self.model.mtp is not None and self.cache.drafts:
            self.model.mtp.remember(output.taps, output.tapped, self.cache)

    def tokens_replayed(self) -> int:
        """How many tokens a replay runs at most, in its lowest layer."""
        config = self.model.config
        if self.replay == "bounded":
            return config.window_size
        return Halo(0, config.n_layers - 1, config.window_size + self.cache.slack, config.window_size).reach(0)
