from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

# a machine that is busy is not a failure
settings.register_profile("fitter", deadline=None)
settings.load_profile("fitter")


@pytest.fixture(autouse=True, scope="session")
def own_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what fitter has measured and stored for this machine out of the tests, and theirs out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("configuration")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
