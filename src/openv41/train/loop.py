"""The loop: packs in, metrics and checkpoints out. A run that was ended in any way goes on at its last checkpoint.

    rates -> each pack: forward, losses, backward -> are all numbers finite? -> clip -> optimizers -> biases -> a line

Everything that decides a number is in the settings and in the checkpoint: on a CPU a resumed run has the same bits as
one that was never ended (with the same number of threads).
"""

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openv41.errors import ConfigError, TrainingStopped
from openv41.model.transformer import Output
from openv41.train import checkpoints
from openv41.train.balance import Routing, imbalance
from openv41.train.data import Pack, Packs, Place, once
from openv41.train.draft import draft_loss, draw_blocks
from openv41.train.language import language_loss, run_headless
from openv41.train.lessons import Lessons, Target
from openv41.train.optimizers import Optimizers, rate_at
from openv41.train.settings import Settings
from openv41.train.setup import open_model, open_texts
from openv41.train.trainable import published

METRICS = "metrics.jsonl"
RECENT = 20
"""Steps whose mean loss an exploding one is compared with."""

Report = Callable[[dict[str, Any]], None]
"""Told every line of the metrics as it is written."""


class Training:
    """A run, opened at its last checkpoint or at its beginning. `step` steps are done.

    Raises what `open_model` and `open_texts` raise, and `ConfigError` when the folder holds a run of other settings.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.folder = settings, Path(settings.folder)
        state = self._saved()  # before anything slow
        self.config, self.vocabulary, self.model = open_model(settings)
        tokenizer, data = self.vocabulary.tokenizer, settings.data
        train, held = open_texts(data, tokenizer, self.config.vocab_size)
        self.packs = Packs(train, data.context, data.tokens, settings.seed)
        self.held = once(held, data.context, data.tokens, data.validation_tokens)
        self.optimizers = Optimizers(self.model, settings.optimizer)
        self.routing = Routing(self.model)
        if settings.loss.draft_only:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name.startswith("mtp."))
        self.bytes_of = torch.tensor([_text_bytes(tokenizer, id) for id in range(self.config.vocab_size)])
        self.step, self.recent, self.recall = 0, list[float](), dict[str, float]()
        if state is not None:
            self._take_up(state)

    # Running

    def run(self, report: Report | None = None, seconds: float = math.inf) -> bool:
        """Train to the last step, or until `seconds` are over; whether the last step is done. Ends with a checkpoint.

        Raises `TrainingStopped` for numbers that are not finite, or a loss that explodes; the checkpoints before stay.
        """
        record, began = self.settings.record, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints.sweep(self.folder)
        with _Lines(self.folder / METRICS, self.step, report) as lines:
            while self.step < self.settings.steps and time.monotonic() - began < seconds:
                lines.write(self.advance())
                last = self.step == self.settings.steps
                if last or (record.validate_every and self.step % record.validate_every == 0):
                    lines.write({"step": self.step, **self.validate()})
                if last or self.step % record.checkpoint_every == 0:
                    self.save()
        if not self.saved.is_dir():
            self.save()
        return self.step == self.settings.steps

    def advance(self) -> dict[str, Any]:
        """One step; its line of the metrics."""
        began = time.monotonic()
        s, packs = self.settings, [self.packs.next() for _ in range(self.settings.data.packs)]
        share = rate_at(self.step, s.steps, s.optimizer.warmup, s.optimizer.final)
        self.optimizers.set_rate(share)
        self.routing.clear()
        self.recall = dict[str, float]()
        parts: dict[str, float] = {}
        for pack in packs:
            for name, value in self.backward(pack, 1 / len(packs)).items():
                parts[name] = parts.get(name, 0.0) + float(value) / len(packs)
        self._check_losses(parts)
        norm = self.optimizers.norm()
        self._check_gradients(norm)
        self.optimizers.clip(norm)
        self.optimizers.step()
        self.routing.move_bias(s.loss.bias_rate)
        self.step += 1
        self.recent = [*self.recent, parts["language"]][-RECENT:]
        seconds, tokens = time.monotonic() - began, sum(map(len, packs))
        return {
            "step": self.step,
            "tokens": self.step * tokens,
            "loss": parts.pop("language"),
            **parts,
            "rate": s.optimizer.rate * share,
            "norm": float(norm),
            "load": {path: round(imbalance(load), 4) for path, load in self.routing.loads.items() if load.sum()},
            **({"recall": self.recall} if self.recall else {}),
            "seconds": round(seconds, 4),
            "tokens_per_second": round(tokens / seconds, 1),
        }

    def backward(self, pack: Pack, weight: float) -> dict[str, Tensor]:
        """Gradients of one pack's losses times `weight`, added to what is there; the losses by name."""
        loss, device = self.settings.loss, self.settings.device
        step, alone = pack.step(device), loss.draft_only
        lessons = Lessons(self.model) if loss.index and not alone else None
        with torch.no_grad() if alone else self.routing.during(step), lessons or nullcontext():
            hidden, output = run_headless(self.model, step, self.settings.model.recompute)
        with torch.set_grad_enabled(not alone):
            language = language_loss(self.model.head, hidden, pack.targets(device), loss.rows)
        parts = {"language": language}
        if not alone:
            parts["balance"] = self.routing.loss()
            total = language + loss.balance * parts["balance"]
            if lessons is not None and lessons.noted:
                parts["index"] = torch.stack(list(lessons.losses(self._target()).values())).sum()
                total = total + loss.index * parts["index"]
                self._note_recall(lessons)
            (weight * total).backward()
        if loss.draft:
            parts |= self._draft_backward(pack, output, weight * loss.draft)
        return {name: part.detach() for name, part in parts.items()}

    def _target(self) -> Target:
        """What the indexers are held against in this step."""
        loss = self.settings.loss
        over: Literal["picks", "dense"] = "dense" if self.step < loss.index_dense else "picks"
        return Target(loss.index_target, over, loss.index_candidates)

    def _note_recall(self, lessons: Lessons) -> None:
        """Now and then, for a step's first pack: it costs as much as a forward. Layers that pick all are left out."""
        every = self.settings.record.recall_every
        if every and self.step % every == 0 and not self.recall:
            recall = lessons.recall().items()
            self.recall = {str(layer): round(share, 4) for layer, share in recall if math.isfinite(share)}

    def _draft_backward(self, pack: Pack, output: Output, weight: float) -> dict[str, Tensor]:
        """Gradients for the draft's parameters, and for no others: it shares embedding and head with the model."""
        draft, loss = self.model.mtp, self.settings.loss
        assert draft is not None
        # Drawn from the step and the pack alone, so that a resumed run draws the same.
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{self.settings.seed} {self.packs.place}".encode()))
        blocks = draw_blocks(pack, draft.config.dspark_block_size, loss.draft_blocks, drawn)
        if blocks is None:
            return {}
        with self.routing.during(None):
            found = draft_loss(draft, output, blocks)
        parameters = [p for p in draft.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(weight * found.total(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return {"draft": found.language, "confidence": found.confidence, "right": torch.tensor(found.right)}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The language loss of the texts held out, in nats a token, and in bits a byte of their text."""
        device, total, tokens, count = self.settings.device, 0.0, 0, 0
        for pack in self.held:
            hidden, _ = run_headless(self.model, pack.step(device))
            targets = pack.targets()
            total += len(pack) * float(
                language_loss(self.model.head, hidden, targets.to(device), self.settings.loss.rows)
            )
            tokens, count = tokens + len(pack), count + int(self.bytes_of[targets].sum())
        return {"validation": total / tokens, "bits_per_byte": total / math.log(2) / max(1, count)}

    # Numbers that went wrong

    def _check_losses(self, parts: dict[str, float]) -> None:
        if wrong := [f"the {name} loss is {value}" for name, value in parts.items() if not math.isfinite(value)]:
            bad = [name for name, p in self.model.named_parameters() if not p.detach().isfinite().all()]
            raise self._stopped(wrong[0] + (f", and so is the parameter {bad[0]}" if bad else ""))
        if len(self.recent) == RECENT:
            mean = sum(self.recent) / RECENT
            if parts["language"] > mean + self.settings.loss.explosion:
                raise self._stopped(
                    f"the language loss is {parts['language']:.3f} after a mean of {mean:.3f}, more than "
                    f"loss.explosion ({self.settings.loss.explosion}) above it"
                )

    def _check_gradients(self, norm: Tensor) -> None:
        if not norm.isfinite():
            wrong = [name for name, p in self.optimizers.trained() if not _finite(p.grad)]
            others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
            what = f"the gradient of {wrong[0]}{others} is" if wrong else "the norm of the gradients is"
            raise self._stopped(f"{what} not finite")

    def _stopped(self, what: str) -> TrainingStopped:
        steps = checkpoints.saved_steps(self.folder)
        where = f"the last good checkpoint is {checkpoints.folder_of(self.folder, steps[-1])}" if steps else (
            "there is no checkpoint yet"
        )  # fmt: skip
        return TrainingStopped(f"stopped at step {self.step + 1}: {what}; {where}; lower optimizer.rate, or look there")

    # Checkpoints

    @property
    def saved(self) -> Path:
        """The checkpoint of where the run stands, once it is written."""
        return checkpoints.folder_of(self.folder, self.step)

    def save(self) -> Path:
        """Write a checkpoint of where the run stands."""
        if bad := [name for name, p in self.model.named_parameters() if not p.detach().isfinite().all()]:
            raise self._stopped(f"the parameter {bad[0]} is not finite")
        state = {
            "step": self.step,
            "settings": self.settings.to_dict(),
            "weights": {name: p.detach() for name, p in self.model.named_parameters()},
            "optimizers": self.optimizers.state_dict(),
            "place": list(astuple(self.packs.place)),
            "recent": self.recent,
            "random": torch.get_rng_state(),
        }
        tensors, special = published(self.model), self.vocabulary.tokenizer.special
        keep, files = self.settings.record.keep, self.vocabulary.files
        return checkpoints.save(self.folder, self.step, self.config, special, tensors, files, state, keep)

    def _saved(self) -> dict[str, Any] | None:
        """The state to resume from, if there is one."""
        steps = checkpoints.saved_steps(self.folder)
        if not steps:
            return None
        state = checkpoints.load(self.folder, steps[-1])
        if other := self.settings.differs_from(state["settings"]):
            raise ConfigError(
                f"{self.folder} holds a run with another {', '.join(other)}: set it back, or give another folder"
            )
        return state

    @torch.no_grad()
    def _take_up(self, state: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state["weights"][name])
        self.optimizers.load_state_dict(state["optimizers"])
        self.packs.place = Place(*state["place"])
        self.step, self.recent = state["step"], list(state["recent"])
        torch.set_rng_state(state["random"])


class _Lines:
    """The metrics, a JSON object a line. Lines of steps after `step`, which are to be run again, are dropped first."""

    def __init__(self, path: Path, step: int, report: Report | None) -> None:
        self.path, self.report = path, report
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        fresh = path.with_name(f".{path.name}.partial")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(fresh, path)

    def __enter__(self) -> "_Lines":
        self.file = self.path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.report is not None:
            self.report(line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, but for a last one that was never finished; none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _finite(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


def _text_bytes(tokenizer: Any, id: int) -> int:
    """Bytes of text that a token stands for; begin, end and padding stand for none."""
    special = tokenizer.special
    return 0 if id in (special.bos, special.eos, special.pad) else len(tokenizer.token_bytes(id))
