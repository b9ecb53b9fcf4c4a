"""`bench kernels`: cases are judged each by itself, and those that disagree have no figure. Without a GPU, so the clock
and the machine's ceilings are stand-ins; cases and judgement are the benchmark's own."""

import pytest
import torch

from openv41.bench import kernels
from openv41.bench.case import Case
from openv41.bench.gpu import Ceilings
from openv41.bench.measure import Timing
from openv41.bench.results import Settings, format_report
from openv41.errors import OpsError


def fails() -> float:
    raise OpsError("no such tile")


CASES = [
    Case("product", "good", lambda: None, lambda: 0.5, 1.0, bytes=4e6, aim_us=10.0, peers={"peer": lambda: None}),
    Case("product", "far off", lambda: None, lambda: 2.0, 1.0, bytes=4e6),
    Case("product", "not a number", lambda: None, lambda: float("nan"), 1.0, bytes=4e6),
    Case("product", "failing", lambda: None, fails, 1.0, bytes=4e6),
    Case("product", "also good", lambda: None, lambda: 0.0, 0.0, bytes=8e6),
]


@pytest.fixture
def machine(monkeypatch):
    """A GPU that copies 4 TB/s and takes 2 us for everything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a machine")
    monkeypatch.setattr(kernels, "ceilings", lambda: Ceilings(4e12, 8e14, 1.6e15))
    monkeypatch.setattr(kernels, "_cases", lambda only: (case for case in CASES if only in case.case))
    monkeypatch.setattr(kernels, "_of_machine", lambda here: ())
    monkeypatch.setattr(kernels, "captured", lambda call: call)
    monkeypatch.setattr(
        kernels, "measure_gpu", lambda calls, repeats: dict.fromkeys(calls, Timing(0.002, 0.002, 0.002, repeats))
    )


def test_one_case_that_disagrees_leaves_the_others_their_figures(machine):
    report = kernels.run(Settings(ops="hopper"), lambda line: None)
    told = report.to_dict()
    assert not report.agreement.passed
    assert list(told["figures"]) == ["product,_good", "product,_good_peer", "product,_also_good"]
    assert told["figures"]["product,_also_good"]["note"] == "100 % of the floor of 2.0 us"
    assert [failure.split(": ", 1)[0] for failure in told["agreement"]["failures"]] == [
        f"product, {case}" for case in ("far off", "not a number", "failing")
    ]
    assert "no such tile" in told["agreement"]["failures"][2]
    text = format_report(report)
    assert text.count("DIFFERS") == 3 and "also good" in text and "no figures of these" in text


def test_all_that_agree_pass(machine):
    report = kernels.run(Settings(ops="hopper", only="good"), lambda line: None)
    assert report.agreement.passed and report.agreement.compared == 2
