"""Options and fixtures that all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Machines differ in speed and tests run side by side: no example is ever judged by its time.
settings.register_profile("project", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the expected files anew instead of comparing",
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether expected files are to be written anew."""
    return bool(request.config.getoption("--update-golden"))
