"""What each of several processes runs for `test_parallel.py`: commands one after the other, as `torchrun` starts one.

    python -m tests.train.ranks JOBS.json

A job is the arguments of `openv41`, and how its run is disturbed in the second process. Into the folder of the jobs
goes, by job and process, the exit code and what was written.
"""

import contextlib
import io
import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import torch

from openv41.cli import main
from openv41.train.loop import Training


def disturbed(training, how):
    """A run that goes wrong: in its second step, or at once in the gradient of a table."""
    if how == "nan":
        spoil = lambda part, given, result: result * math.nan if training.step == 1 else result  # noqa: E731
        training.model.norm.register_forward_hook(spoil)
    if how == "table":
        training.model.layers[1].engram.embed.weight.register_hook(lambda gradient: gradient * math.inf)


def rows_of(training):
    """How many rows of each parameter this process holds, and how many there are."""
    return {name: [len(training.processes.own(p)), len(p)] for name, p in training.model.named_parameters()}


def meeting(path, number):
    """A port for all processes, which the first one finds free and tells in a file."""
    if number == 0:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def run(path):
    jobs, number = json.loads(path.read_text()), int(os.environ["RANK"])
    opened = Training.__init__
    for place, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = meeting(path.with_name(f"port-{place}"), number)
        seen = {}

        def init(training, *arguments, job=job, seen=seen):
            opened(training, *arguments)
            seen.update(rows_of(training))
            if number == 1:
                disturbed(training, job["disturbed"])

        Training.__init__ = init
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(job["arguments"])
        result = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "rows": seen}
        path.with_name(f"{place}-{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
