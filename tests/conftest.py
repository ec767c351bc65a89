"""Shared fixtures: the geometries every contract is tested on."""

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
from toys import GEOMETRIES  # noqa: E402


@pytest.fixture(params=sorted(GEOMETRIES))
def geometry(request: pytest.FixtureRequest) -> str:
    """Name of a toy geometry; a test that takes it runs on all of them."""
    if request.param.startswith("openai"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("clip.model", reason="OpenAI's clip is not installed (tests only)")
    return request.param


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Listings of generated trees do not go to the user's cache folder, in sub-processes neither."""
    os.environ["DEAR_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def root() -> Path:
    return ROOT
