"""Tests that need a CUDA device: skipped without one, unless they must run (``make gpu-check``)."""

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--gpu-must-run", action="store_true", help="fail where no GPU test ran")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


ran: list[str] = []


def pytest_runtest_logreport(report):
    if report.when == "call" and not report.skipped and "gpu" in report.keywords:
        ran.append(report.nodeid)


def pytest_sessionfinish(session):
    if session.config.getoption("--gpu-must-run", default=False) and not ran:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--gpu-must-run", default=False):
        terminalreporter.write_line(f"{len(ran)} GPU tests ran" if ran else "ERROR: no GPU test ran")


@pytest.fixture
def device():
    return torch.device("cuda")
