"""The loop: packs in, metrics and checkpoints out. A run that was ended in any way goes on at its last checkpoint.

    rates -> each pack: forward, losses, backward -> are all numbers finite? -> clip -> optimizers -> biases -> a line

Everything that decides a number is in the settings and in the checkpoint: on a CPU a resumed run has the same bits as
one that was never ended (with the same number of threads). Several processes may share the work of each step: see
`openv41.train.parallel`.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from openv41.errors import InputError, TrainingStopped
from openv41.model.masters import change_ops
from openv41.train import checkpoints
from openv41.train.balance import imbalances
from openv41.train.data import Pack, Packs, Place, once
from openv41.train.draft import Blocks, draw_blocks
from openv41.train.lessons import Target
from openv41.train.losses import Ask, Losses
from openv41.train.optimizers import Optimizers
from openv41.train.parallel import Alone, Processes, deal, share
from openv41.train.schedule import Phase, check_resumable, phase_at
from openv41.train.settings import Settings
from openv41.train.setup import name_of, open_model, open_texts, ops_of
from openv41.train.trainable import published_of

METRICS = "metrics.jsonl"
RECENT = 20
"""Steps whose mean loss an exploding one is compared with."""

Report = Callable[[dict[str, Any]], None]
"""Told every line of the metrics as it is written."""


class Training:
    """A run, opened at its last checkpoint or at its beginning. `step` steps are done.

    `processes`: those that share the work, each with a `Training` of its own, and all of whose methods all must call.
    Raises what `open_model` and `open_texts` raise, and `ConfigError` when the folder holds a run of other settings or
    the packs of a step cannot be divided over the processes.
    """

    def __init__(self, settings: Settings, processes: Processes | None = None) -> None:
        self.processes = processes or Alone()
        settings = replace(settings, device=self.processes.device(settings.device))
        self.settings, self.folder = settings, Path(settings.folder)
        share(range(settings.data.packs), self.processes)  # complaints come before anything slow
        state = self._saved()
        self.config, self.vocabulary, self.model = open_model(settings)
        tokenizer, data = self.vocabulary.tokenizer, settings.data
        train, held = open_texts(data, tokenizer, self.config.vocab_size)
        self.packs = Packs(train, data.context, data.tokens, settings.seed)
        self.held = once(held, data.context, data.tokens, data.validation_tokens)
        if settings.loss.draft_only:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and name.startswith("mtp."))
        self.losses = Losses(self.model, settings)
        self.processes.shard(self.losses)
        self.optimizers, self.routing = Optimizers(self.model, settings.optimizer, self.processes), self.losses.routing
        self.bytes_of = torch.tensor([_text_bytes(tokenizer, id) for id in range(self.config.vocab_size)])
        self.step, self.recent, self.recall = 0, list[float](), dict[str, float]()
        self.phase, self.machine = phase_at(settings, 0), name_of(settings.device)
        if state is not None:
            self._take_up(state)

    # Running

    def run(self, report: Report | None = None, seconds: float = math.inf) -> bool:
        """Train to the last step, or until `seconds` are over; whether the last step is done. Ends with a checkpoint.

        Raises `TrainingStopped` for numbers that are not finite, or a loss that explodes; the checkpoints before stay.
        """
        record, until = self.settings.record, time.monotonic() + seconds
        self._check_together()
        if self.writes:
            checkpoints.prepare(self.folder)
        with _Lines(self.folder / METRICS if self.writes else None, self.step, report) as lines:
            while self.step < self.settings.steps and self.processes.agree(time.monotonic() < until):
                lines.write(self.advance())
                last = self.step == self.settings.steps
                if last or (record.validate_every and self.step % record.validate_every == 0):
                    lines.write({"step": self.step, **self.validate()})
                if last or self.step % record.checkpoint_every == 0:
                    self.save()
        if not self.processes.agree(self.saved.is_dir()):
            self.save()
        return self.step == self.settings.steps

    def advance(self) -> dict[str, Any]:
        """One step; its line of the metrics."""
        began = time.monotonic()
        s, packs = self.settings, [self.packs.next() for _ in range(self.settings.data.packs)]
        self._enter(phase_at(s, self.step))
        self.routing.clear()
        self.recall = dict[str, float]()
        parts, mine = dict[str, float](), share(packs, self.processes)
        for pack in mine:
            for name, value in self.backward(pack, 1 / len(mine)).items():
                parts[name] = parts.get(name, 0.0) + float(value) / len(mine)
        parts = self.processes.mean(parts)
        self._check_losses(parts)
        norm = self.optimizers.norm()
        self._check_gradients(norm)
        self.optimizers.clip(norm)
        self.optimizers.step()
        self.routing.join(self.processes)
        self.routing.move_bias(s.loss.bias_rate)
        self.step += 1
        self.recent = [*self.recent, parts["language"]][-RECENT:]
        seconds, tokens = time.monotonic() - began, sum(map(len, packs))
        return {
            "step": self.step,
            "tokens": self.step * tokens,
            "loss": parts.pop("language"),
            **parts,
            "rate": s.optimizer.rate * self.phase.rate,
            "numerics": self.phase.numerics,
            "norm": float(norm),
            "load": {path: round(most, 4) for path, most in imbalances(self.routing.loads).items()},
            **({"recall": self.recall} if self.recall else {}),
            "seconds": round(seconds, 4),
            "tokens_per_second": round(tokens / seconds, 1),
            "device": self.machine,
        }

    def _enter(self, phase: Phase) -> None:
        """What is to hold in the next step."""
        self.phase = phase
        self.optimizers.set_rate(phase.rate)
        if self.model.ops.numerics != phase.numerics:
            change_ops(self.model, ops_of(self.settings, self.config, phase.numerics))

    def backward(self, pack: Pack, weight: float) -> dict[str, Tensor]:
        """Gradients of one pack's losses times `weight`, added to what is there; the losses by name."""
        ask = self._ask()
        total, found = self.losses(pack, ask, self._blocks(pack) if ask.draft else None)
        (weight * total).backward()
        self.recall = self.recall or found.recall
        return found.parts

    def _ask(self) -> Ask:
        """What is asked for in this step. Recall is, now and then, of a step's first pack: it costs as much as a
        forward."""
        loss, every = self.settings.loss, self.settings.record.recall_every
        over: Literal["picks", "dense"] = "dense" if self.step < loss.index_dense else "picks"
        recall = self.writes and every > 0 and self.step % every == 0 and not self.recall
        taught = loss.index > 0 and self.step % loss.index_every == 0
        target = Target(loss.index_target, over, loss.index_candidates) if taught else None
        return Ask(target, recall, self.phase.draft)

    def _blocks(self, pack: Pack) -> Blocks:
        """The blocks of a pack that the draft learns from."""
        # Drawn from the step and the pack alone, so that a resumed run draws the same.
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{self.settings.seed} {self.packs.place}".encode()))
        return draw_blocks(pack, self.config.dspark_block_size, self.settings.loss.draft_blocks, drawn)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The language loss of the texts held out, in nats a token, and in bits a byte of their text."""
        total, tokens, count, began = 0.0, 0, 0, time.monotonic()
        for pack in deal(self.held, self.processes):
            mean, _ = self.losses(self.held[0] if pack is None else pack, None)  # all run equally often
            if pack is not None:
                total += len(pack) * float(mean)
                tokens, count = tokens + len(pack), count + int(self.bytes_of[pack.targets()].sum())
        sums = self.processes.add(torch.tensor([total, tokens, count], dtype=torch.float64)).tolist()
        loss, bits, seconds = sums[0] / sums[1], sums[0] / math.log(2) / max(1, sums[2]), time.monotonic() - began
        return {"validation": loss, "bits_per_byte": bits, "seconds": round(seconds, 4)}

    # Numbers that went wrong

    def _check_losses(self, parts: dict[str, float]) -> None:
        if wrong := [f"the {name} loss is {value}" for name, value in parts.items() if not math.isfinite(value)]:
            bad = self._not_finite(self.model.named_parameters())
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
            wrong = self._not_finite((name, _values(p.grad)) for name, p in self.optimizers.trained())
            others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
            what = f"the gradient of {wrong[0]}{others} is" if wrong else "the norm of the gradients is"
            raise self._stopped(f"{what} not finite")

    def _not_finite(self, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of those that hold a number that is not finite, in any process."""
        own = {name: self.processes.own(tensor.detach()) for name, tensor in tensors}
        wrong = self.processes.add(torch.stack([~one.isfinite().all() for one in own.values()]).int()).tolist()
        return [name for name, count in zip(own, wrong, strict=True) if count]

    def _check_together(self) -> None:
        """All processes must stand at the same step."""
        steps = torch.zeros(self.processes.count, dtype=torch.int64)
        steps[self.processes.number] = self.step
        if len(done := set(self.processes.add(steps).tolist())) > 1:
            raise InputError(
                f"all processes must go on after the same step, got {sorted(done)}: give them one folder that all see"
            )

    def _stopped(self, what: str) -> TrainingStopped:
        steps = checkpoints.saved_steps(self.folder)
        where = f"the last good checkpoint is {checkpoints.folder_of(self.folder, steps[-1])}" if steps else (
            "there is no checkpoint yet"
        )  # fmt: skip
        return TrainingStopped(f"stopped at step {self.step + 1}: {what}; {where}; lower optimizer.rate, or look there")

    # Checkpoints

    @property
    def writes(self) -> bool:
        """Whether this process writes the files."""
        return self.processes.number == 0

    @property
    def saved(self) -> Path:
        """The checkpoint of where the run stands, once it is written."""
        return checkpoints.folder_of(self.folder, self.step)

    def save(self) -> Path:
        """Write a checkpoint of where the run stands."""
        if bad := self._not_finite(self.model.named_parameters()):
            raise self._stopped(f"the parameter {bad[0]} is not finite")
        weights = self._weights()
        state = {
            "step": self.step,
            "settings": self.settings.to_dict(),
            "weights": weights,
            "optimizers": self.optimizers.state_dict(),
            "place": list(astuple(self.packs.place)),
            "recent": self.recent,
            "random": torch.get_rng_state(),
        }
        if self.writes:
            tensors, special = published_of(weights), self.vocabulary.tokenizer.special
            keep, files = self.settings.record.keep, self.vocabulary.files
            checkpoints.save(self.folder, self.step, self.config, special, tensors, files, state, keep)
        self.processes.wait()
        return self.saved

    def _weights(self) -> dict[str, Tensor]:
        """All parameters, whole, on the CPU, in the process that writes."""
        weights = {}
        for name, parameter in self.model.named_parameters():
            whole = self.processes.whole(parameter, self.processes.own(parameter.detach()))
            if self.writes:
                weights[name] = whole.cpu()
        return weights

    def _saved(self) -> dict[str, Any] | None:
        """The state to resume from, if there is one."""
        steps = checkpoints.saved_steps(self.folder)
        if not steps:
            return None
        state = checkpoints.load(self.folder, steps[-1])
        check_resumable(self.settings, Settings.from_dict(state["settings"]), state["step"])
        return state

    @torch.no_grad()
    def _take_up(self, state: dict[str, Any]) -> None:
        for name, parameter in self.model.named_parameters():
            self.processes.own(parameter).copy_(state["weights"][name][self.processes.rows(parameter)])
        self.optimizers.load_state_dict(state["optimizers"])
        self.packs.place = Place(*state["place"])
        self.step, self.recent = state["step"], list(state["recent"])
        torch.set_rng_state(state["random"])


class _Lines:
    """The metrics, a JSON object a line. Lines of steps after `step`, which are to be run again, are dropped first.
    Without a path another process writes them."""

    def __init__(self, path: Path | None, step: int, report: Report | None) -> None:
        self.path, self.report = path, report
        if path is not None:
            kept = [line for line in read_metrics(path) if line["step"] <= step]
            fresh = path.with_name(f".{path.name}.partial")
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(fresh, path)

    def __enter__(self) -> "_Lines":
        self.file = None if self.path is None else self.path.open("a")
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.report is not None:
            self.report(line)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, but for a last one that was never finished; none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _values(gradient: Tensor | None) -> Tensor:
    """The numbers of a gradient that is there."""
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _text_bytes(tokenizer: Any, id: int) -> int:
    """Bytes of text that a token stands for; begin, end and padding stand for none."""
    special = tokenizer.special
    return 0 if id in (special.bos, special.eos, special.pad) else len(tokenizer.token_bytes(id))
