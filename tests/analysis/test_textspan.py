"""TEXTSPAN: against a plain float64 implementation on the images themselves, streaming, resampling, refusals."""

import pytest
import torch

from dear_plugin.analysis.textspan import HeadMoments, describe, describe_heads, resampled_weights, shared_descriptions


def plain_textspan(x, text, n, rank, span):
    """The definition, on X itself: project, choose by the sum of squared products, remove, repeat."""
    x, text = x.double(), text.double()
    centred = x - x.mean(0)
    basis = torch.linalg.svd(centred if span == "centred" else x, full_matrices=False).Vh[:rank]
    text, left, total = text @ basis.T @ basis, centred.clone(), centred.square().sum()
    chosen, shares = [], []
    for _ in range(n):
        best = int((left @ text.T).square().sum(0).argmax())
        unit = text[best] / text[best].norm()
        chosen.append(best)
        shares.append(((left @ unit).square().sum() / total).item())
        left = left - torch.outer(left @ unit, unit)
        text = text - torch.outer(text @ unit, unit)
    return chosen, shares


def case(seed, n=60, e=16, m=50):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g) @ torch.randn(5, e, generator=g) + 0.1 * torch.randn(n, e, generator=g)
    return x + torch.randn(e, generator=g), torch.nn.functional.normalize(torch.randn(m, e, generator=g), dim=-1)


def moments_of(x, batch=7, blocks=4):
    found = HeadMoments(1, 1, x.shape[1], blocks=blocks)
    for i, part in enumerate(x[:, None, None].split(batch)):
        found.add(part, i % blocks)
    return found


@pytest.mark.parametrize("span", ["centred", "raw"])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_plain_float64_definition(seed, span):
    x, text = case(seed)
    found = describe_heads(moments_of(x).total(), text, n=8, rank=12, span=span)[0][0]
    chosen, shares = plain_textspan(x, text, 8, 12, span)
    assert list(found.indices) == chosen
    assert found.shares == pytest.approx(shares, rel=1e-7, abs=1e-12)


def test_the_variance_explained_never_exceeds_all_and_is_all_for_a_full_span():
    x, _ = case(1)
    found = describe(moments_of(x).total().covariance()[0, 0], torch.eye(16), n=16, rank=16)
    assert sum(found.shares) == pytest.approx(1.0)
    assert sorted(found.indices) == list(range(16))


def test_how_images_are_batched_does_not_matter():
    x, text = case(2)
    first, second = (describe_heads(moments_of(x, b).total(), text, n=6, rank=10)[0][0] for b in (1, 60))
    assert first.indices == second.indices and first.shares == pytest.approx(second.shares)


def test_equal_sentences_are_chosen_once():
    x, text = case(3)
    found = describe(moments_of(x).total().covariance()[0, 0], torch.cat([text, text]), n=10, rank=16)
    assert len({i % len(text) for i in found.indices}) == 10


def test_resampling_counts_blocks_and_its_rows_sum_to_their_number():
    x, _ = case(4)
    found = moments_of(x, batch=15, blocks=4)
    twice = torch.cat([x[:15], x[:15], x[30:]])
    wanted = moments_of(twice).total()
    got = found.total(torch.tensor([2.0, 0.0, 1.0, 1.0]))
    assert torch.allclose(got.covariance(), wanted.covariance())
    weights = resampled_weights(4, draws=5, seed=3)
    assert weights.sum(1).tolist() == [4.0] * 5 and torch.equal(weights, resampled_weights(4, draws=5, seed=3))


@pytest.mark.parametrize(
    ("n", "rank", "m", "words"),
    [(8, 12, 5, "5 sentences, fewer than n = 8"), (13, 12, 50, "n must lie between 1 and the rank"),
     (3, 17, 50, "rank must")],
)
def test_bad_sizes_are_refused(n, rank, m, words):
    x, text = case(0)
    with pytest.raises(ValueError, match=words):
        describe(moments_of(x).total().covariance()[0, 0], text[:m], n=n, rank=rank)


def test_heads_that_share_sentences_are_listed():
    described = [((0, 0), (1, 2, 3)), ((0, 1), (1, 2, 9)), ((0, 2), (7, 8, 5))]
    assert shared_descriptions(described) == [((0, 0), (0, 1), pytest.approx(2 / 3))]
