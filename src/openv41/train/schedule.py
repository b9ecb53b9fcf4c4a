"""What changes while a run goes on: the learning rate, the numerics, whether the draft learns.

    steps     0 ... warmup ........ draft_from x steps .... published_from x steps .... steps
    rate      a line up, then the highest, then from (1 - cooldown) x steps on a cosine down
    numerics  plain ........................................ published ................
    draft     as it is ............ learns ...........................................

All of it follows from the settings and the number of the step, so a resumed run does what an unbroken one does. As long
as nothing that was done would have been done otherwise, `steps` and the three shares may be changed between two calls:
a run at its highest rate may be given more steps, or fewer, and its cooldown begins where they say.
"""

from dataclasses import dataclass

from openv41.errors import ConfigError
from openv41.ops import Numerics
from openv41.train.optimizers import rate_at
from openv41.train.settings import Settings

MOVABLE = ("steps", "optimizer.cooldown", "model.published_from", "loss.draft_from")
"""Keys that say when something begins or ends, and nothing else."""


@dataclass(frozen=True)
class Phase:
    """What holds in one step: the rate as a share of the highest, the numerics, the weight of the draft's loss."""

    rate: float
    numerics: Numerics
    draft: float


def phase_at(settings: Settings, step: int) -> Phase:
    """What holds in step 0, 1, ... `steps` - 1."""
    s, steps = settings, settings.steps
    rate = rate_at(step, steps, s.optimizer.warmup, s.optimizer.final, s.optimizer.cooldown)
    published = s.model.numerics == "published" or step >= begin_of(s.model.published_from, steps)
    draft = s.loss.draft if step >= begin_of(s.loss.draft_from, steps) else 0.0
    return Phase(rate, "published" if published else "plain", draft)


def begin_of(share: float, steps: int) -> int:
    """The first step of what begins after this share of all steps."""
    return round(share * steps)


def check_resumable(settings: Settings, before: Settings, done: int) -> None:
    """Raises `ConfigError` when `settings` are not a continuation of the first `done` steps of the run `before`."""
    keys = settings.differs_from(before.to_dict())
    if other := [key for key in keys if key not in MOVABLE]:
        raise ConfigError(
            f"{settings.folder} holds a run with another {', '.join(other)}: set it back, or give another folder"
        )
    if settings.steps < done:
        raise ConfigError(
            f"steps must be at least {done} here, got {settings.steps}: so many are done in {settings.folder}; raise it"
        )
    changed = [step for step in range(done) if phase_at(settings, step) != phase_at(before, step)]
    if keys and changed:
        raise ConfigError(
            f"{', '.join(keys)} may change as long as no step would have been another, but step {changed[0] + 1} of "
            f"the {done} that are done in {settings.folder} would: set it back, or give another folder"
        )
