"""The page: self-contained, and in a real headless Chromium a click on a head shows its sentences."""

import re
import shutil
import subprocess

import numpy as np
import pytest
from concept_toys import FAMILIES, encode, sentences
from toys import toy_clip

from dear_plugin.analysis import report
from dear_plugin.analysis.concepts import ConceptSettings, find_concepts
from dear_plugin.analysis.entropy import HeadSentences, entropy_role_map
from dear_plugin.analysis.streaming import ArrayPictures, Preparation
from dear_plugin.towers import vision_tower

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync --virtual-time-budget=3000").split()


@pytest.fixture
def data():
    heads = {(2, 0): HeadSentences(("red one", "blue two"), (0.6, 0.2)),
             (2, 1): HeadSentences(("circle one", "happy two"), (0.4, 0.4))}
    settings = ConceptSettings(min_cluster_size=5, min_samples=2)
    concepts = find_concepts(sentences(), encode, encoder="toy", settings=settings, families=FAMILIES)
    role_map = entropy_role_map(heads, concepts, model=None)
    import torch

    pixels = np.random.default_rng(0).integers(0, 256, (9, 48, 48, 3), dtype=np.uint8)
    first = {place: torch.randn(32, generator=torch.Generator().manual_seed(1)) for place in heads}
    examples = report.find_examples(vision_tower(toy_clip("open_clip")), ArrayPictures(pixels),
                                    Preparation((0.5,) * 3, (0.25,) * 3), (2,), first, count=3)
    return report.page_data(role_map, heads, concepts, about="a toy </script> page", examples=examples)


def test_the_page_needs_no_other_file_and_its_data_cannot_end_the_script(tmp_path, data):
    text = report.write_page(tmp_path / "report.html", data).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert text.count("</script>") == 2


def test_a_click_on_a_head_shows_its_sentences(tmp_path, data):
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page was not opened")
    page = report.write_page(tmp_path / "report.html", data)
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", "<script>document.getElementById('head-2-1').click()</script></body>"))
    done = subprocess.run([CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
                          capture_output=True, text=True, timeout=120)
    shown = done.stdout.split('id="sentences">')[1].split("</div></div></div>")[0]
    assert "circle one" in shown and "red one" not in shown
    assert 'id="head-title">Layer 2, head 1: ' in done.stdout
    assert done.stdout.count("<figure>") == 9


def test_pngs_are_written(tmp_path, data):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [analysis])")
    assert all(path.stat().st_size > 1000 for path in report.write_pngs(tmp_path, data))
