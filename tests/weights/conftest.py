"""One small checkpoint for all tests here, and copies of it to break."""

import shutil
from pathlib import Path

import pytest
from broken_checkpoint import Broken

from openv41.weights.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint. Read only: break a copy."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder)
    return folder


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Broken:
    return Broken(Path(shutil.copytree(tiny, tmp_path / "broken")))
