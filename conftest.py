"""What every test of the repository shares: how skips count, outside data, properties.

With ``CI=true`` a skipped test is a failure, since nobody reads the list of skips there. Only a
test that needs the data beside the repository may be skipped: that comes from elsewhere.
"""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

CI = os.environ.get("CI") == "true"

# A deadline for each example measures the machine, not the code; pytest's timeout bounds the test.
# In CI the examples are the same in every run, so that a change is judged for what it changes.
settings.register_profile("waterclock", deadline=None, print_blob=True, derandomize=CI)
settings.load_profile("waterclock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes the fixture ``shared_data``, and what lies in ``tests/faults``."""
    for item in items:
        if "shared_data" in getattr(item, "fixturenames", ()):
            item.add_marker("shared_data")
        if item.path.is_relative_to(item.config.rootpath / "tests" / "faults"):
            item.add_marker("faults")


def _fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        skip = report.longrepr
        reason = skip[2] if isinstance(skip, tuple) else skip
        report.outcome = "failed"
        report.longrepr = f"no skipped test expected in CI, found: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip in CI into a failure."""
    report = yield
    if item.get_closest_marker("shared_data") is None:
        _fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a skip of a whole file in CI into a failure."""
    report = yield
    _fail_if_skipped(report)
    return report


@pytest.fixture(scope="session")
def shared_data(pytestconfig: pytest.Config) -> Path:
    """The folder of data beside the repository; the test is skipped where there is none."""
    folder = pytestconfig.rootpath.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the data beside the repository (../shared) is absent")
    return folder
