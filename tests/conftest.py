"""What every test stands on: the seed, the number of threads, shape checks, and which tests this machine can run.

This file must not import openv41 before the import hook is in place: a module imported earlier goes unchecked.
"""

import os
import random
import sys
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Set before torch and numpy are imported, and for every process that a test starts. A worker of pytest-xdist has one
# thread: there are as many workers as cores, and two threads each would only wait for one another.
THREADS = 1
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

USUAL_SEED = 41


def seed_of_this_run() -> int:
    """`OPENV41_SEED`: a number, the usual one where it is not set, or `random` for one that is drawn here."""
    word = os.environ.get("OPENV41_SEED", str(USUAL_SEED))
    return random.SystemRandom().randrange(2**31) if word == "random" else int(word)


# Workers inherit the environment, so all of them use the seed that the header shows.
SEED = seed_of_this_run()
os.environ["OPENV41_SEED"] = str(SEED)
SHAPES_CHECKED = os.environ.get("OPENV41_JAXTYPING", "1") != "0"

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(THREADS)

# Kernels run in Triton's interpreter where there is no GPU. It is asked for before any kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: the first call of an example pays for caches and shape checks. A failure prints how to repeat it.
hypothesis.settings.register_profile("openv41", deadline=None, print_blob=True)
hypothesis.settings.load_profile("openv41")


class AsWritten(MetaPathFinder):
    """Finds some modules ahead of the import hook: the kernels, whose source Triton reads, so that nothing may wrap
    them; the exact sums, which the reference calls thousands of times a step (their callers are checked); and
    `explain`, which makes a function for each of the model's edges whenever it records, and each would be wrapped."""

    PACKAGES = ("openv41.ops.kernels", "openv41.ops.exact", "openv41.explain")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if any(fullname == package or fullname.startswith(package + ".") for package in self.PACKAGES):
            return PathFinder.find_spec(fullname, path, target)
        return None


if SHAPES_CHECKED:
    import jaxtyping

    early = [name for name in sys.modules if name.partition(".")[0] == "openv41"]
    assert not early, f"imported before the shape checks were in place: {early}"
    jaxtyping.install_import_hook("openv41", "beartype.beartype")
    sys.meta_path.insert(0, AsWritten())


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws from the same seed, unless it was given one of its own."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(SEED)


def pytest_report_header(config: pytest.Config) -> str:
    shapes = "checked" if SHAPES_CHECKED else "not checked (OPENV41_JAXTYPING=0)"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"openv41: seed {SEED} (OPENV41_SEED=random draws one), shapes {shapes}, torch {torch.__version__}, {device}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    """Says the seed once more beside a failure: the header scrolls away, and -q leaves it out."""
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        terminalreporter.write_line(f"These failures had the seed {SEED}: OPENV41_SEED={SEED} repeats them.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def number_of(test: str) -> int:
    """A test's own number in this run, of 32 bits: torch's CPU generator uses no more of its seed."""
    return zlib.crc32(f"{SEED} {test}".encode())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a generator is the same in any order of tests as well."""
    torch.manual_seed(number_of(item.nodeid))


@pytest.fixture(scope="session")
def seed() -> int:
    """The seed of this run."""
    return SEED


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator of this test's own: the same numbers in any order of tests, other numbers in another test."""
    return torch.Generator().manual_seed(number_of(request.node.nodeid))
