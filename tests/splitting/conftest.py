import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def processor_folder(tmp_path_factory):
    from shoal.splitting.processors import build_qwen_processor

    return build_qwen_processor(tmp_path_factory.mktemp("processor") / "qwen", vocabulary=20_000)


@pytest.fixture(scope="session")
def processor(processor_folder):
    from shoal.splitting.processors import load_processor

    return load_processor(processor_folder)


@pytest.fixture
def make_root(tmp_path):
    """A folder of synthetic recordings; returns (root, ids)."""
    from shoal.splitting.synthetic import write_gui_recordings

    def make(count=1, name="recordings", **options):
        return tmp_path / name, write_gui_recordings(tmp_path / name, count, **options)

    return make


@pytest.fixture
def damaged(make_root):
    """Seven trajectories of which the third has broken JSON and the sixth misses an image."""
    root, ids = make_root(7, steps=(2, 4), size=(90, 70))
    (root / ids[2] / "final_messages.json").write_text("[{")
    (root / ids[5] / "image_0001.png").unlink()
    return root, ids
