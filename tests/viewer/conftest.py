"""A run opened as the pages have it, and a Chromium for each file of tests that needs one."""

import pytest
from tests.viewer.browser import Browser, chromium

from shoal.viewer.runs import Run


@pytest.fixture
def opened():
    """Gives the run of a folder with its episodes read."""

    def open_run(folder):
        run = Run(folder)
        run.index.refresh()
        return run

    return open_run


@pytest.fixture(scope="module")
def browser():
    if chromium() is None:
        pytest.fail("Chromium is not installed: `make test-browser` installs it from Debian's packages")
    with Browser() as browser:
        browser.size(1280)
        yield browser
