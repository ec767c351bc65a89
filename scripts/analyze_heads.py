"""Find out without labels which head of a CLIP does what: TEXTSPAN, concepts, Concept Entropy, roles, and a report.

    python scripts/analyze_heads.py --backbone tiny --images data/shapes/images --pattern "train_*" --out output/heads
    python scripts/analyze_heads.py --backbone ViT-B/16 --images ~/imagenet/val --limit 5000 --out output/heads_b16
    python scripts/analyze_heads.py --textspan descriptions.txt --out output/heads_text

Writes roles.json (for wrap_clip_with_roles and TRAINER.DEAR.ROLES), heads.json, sentences.txt, report.html and PNGs.
With --causal N the roles are checked on N labelled pictures of the procedural world: each head is replaced by its mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dear_plugin import RoleMap, load_backbone  # noqa: E402
from dear_plugin.analysis import causal, descriptions, report, streaming, textspan  # noqa: E402
from dear_plugin.analysis.concepts import (  # noqa: E402
    Concepts,
    ConceptSettings,
    Encode,
    find_concepts,
    load_sentence_encoder,
    remembering,
    sweep,
)
from dear_plugin.analysis.entropy import (  # noqa: E402
    HeadSentences,
    Thresholds,
    agreement,
    entropy_role_map,
    kept_share,
    label,
)
from dear_plugin.backbones import ASSETS, Backbone  # noqa: E402
from dear_plugin.engine.progress import progress  # noqa: E402
from dear_plugin.engine.records import peak_memory_mib  # noqa: E402
from dear_plugin.roles import write_json_atomically  # noqa: E402
from dear_plugin.towers import VisionTower, text_tower, vision_tower  # noqa: E402
from dear_plugin.weight_files import read_safetensors  # noqa: E402

Heads = dict[tuple[int, int], HeadSentences]
STATE = "moments.safetensors"  # below --out, until the role map is written
SMALL_POOL = 500  # below it the whole pool is clustered: the sentences of the heads alone are too few to form clusters


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--backbone", default=None, help='"tiny", "ViT-B/16", open_clip:<name>/<tag>, or a weight file')
    add("--images", type=Path, help="folder of pictures; no labels are needed")
    add("--pattern", default="*", help='which files below --images, e.g. "train_*"')
    add("--limit", type=int, default=None, help="at most so many pictures, spread evenly")
    add("--scenes", type=int, default=0, help="instead of --images: so many rendered pictures of the procedural world")
    add("--textspan", type=Path, help="start from a published TEXTSPAN output in place of pictures")
    add("--out", type=Path, required=True)
    add("--descriptions", type=Path, help="text file, one sentence a line; default: our own pool")
    add("--sbert", default=None, help="folder of a Sentence-BERT model")
    add("--layers", type=int, default=4, help="how many of the last layers (paper: 4)")
    add("-n", type=int, default=20, help="sentences a head")
    add("--rank", type=int, default=80, help="directions of a head that sentences are projected to")
    add("--span", choices=textspan.SPANS, default="centred", help="raw: as the published TEXTSPAN code takes it")
    add("--cluster", choices=("auto", "described", "pool"), default="auto",
        help=f"sentences that form concepts: those of the heads (paper) or the pool; auto: a pool below {SMALL_POOL}")
    add("--min-cluster-size", type=int, default=ConceptSettings.min_cluster_size)
    add("--min-samples", type=int, default=ConceptSettings.min_samples)
    add("--dimensions", type=int, default=ConceptSettings.dimensions)
    add("--no-merge", action="store_true", help="clusters of one core attribute stay apart")
    add("--low", type=float, default=Thresholds.low, help="share of log2 K below which: attribute head")
    add("--high", type=float, default=Thresholds.high, help="share above which: generalization head")
    add("--bootstrap", type=int, default=20, help="how often the pictures are resampled")
    add("--seed", type=int, default=1)
    add("--batch-size", type=int, default=64)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--resume", action="store_true", help="go on after an interruption")
    add("--save-every", type=float, default=120.0, help="seconds between two savings of what --resume goes on from")
    add("--compare", nargs="*", default=[], help="role maps (paths or shipped names) to state the agreement with")
    add("--causal", type=int, default=0, help="labelled pictures of the procedural world for the causal check")
    add("--report-images", type=int, default=400, help="pictures that the report searches for examples; 0: no report")
    add("--png", action="store_true", help="also write PNGs for a paper (needs matplotlib)")
    args = parser.parse_args(argv)
    sources = [args.images is not None, args.scenes > 0, args.textspan is not None]
    if sum(sources) != 1:
        parser.error("give one of --images FOLDER, --scenes N, --textspan FILE")
    if args.textspan is None and args.backbone is None:
        parser.error("--backbone is needed with pictures")
    return args


# -- what the heads say ----------------------------------------------------------------------------------------------


def known_token_ids(backbone: str) -> list[int] | None:
    """The vocabulary of a packed backbone such as `tiny`; None for one that knows every token."""
    path = ASSETS / "tiny_clip.safetensors" if backbone == "tiny" else Path(backbone)
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    rows = read_safetensors(path).get("token_embedding.rows")
    return None if rows is None else rows.tolist()


def sentence_pool(args: argparse.Namespace, backbone: Backbone) -> tuple[list[str], str]:
    """The sentences and where they come from."""
    if args.descriptions:
        pool, origin = descriptions.read_pool(args.descriptions), str(args.descriptions)
    else:
        pool, origin = descriptions.default_pool(), descriptions.POOL_NAME
    known = known_token_ids(args.backbone)
    if known is not None:
        whole, pool = len(pool), descriptions.covered(pool, backbone.tokenize, known)
        print(f"{args.backbone} knows the words of {len(pool)} of {whole} sentences")
    if len(pool) < args.n:
        raise ValueError(f"the pool has {len(pool)} sentences the backbone knows, fewer than n = {args.n}: give a "
                         "larger one (--descriptions) or a smaller -n")
    return pool, origin


@torch.no_grad()
def text_features(backbone: Backbone, pool: list[str], device: str) -> Tensor:
    """Unit features [M, E] of the pool; positions after the longest end token are never read, so never computed."""
    tower, parts = text_tower(backbone.model), []
    for i in progress(range(0, len(pool), 128), "sentences"):
        ids = backbone.tokenize(pool[i : i + 128]).to(device)
        parts.append(tower.encode_embedded(tower.embed(ids), tower.end_index(ids)).float())
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


def pictures_of(args: argparse.Namespace, size: int) -> streaming.Pictures:
    if args.images is not None:
        return streaming.FolderPictures(args.images, size, pattern=args.pattern, limit=args.limit)
    from datasets.shapes import random_scene, render

    rng = np.random.default_rng([args.seed, 1])
    return streaming.ArrayPictures(np.stack([render(random_scene(rng), rng, size=size) for _ in range(args.scenes)]))


def described(found: list[list[textspan.Description]], pool: list[str], layers: tuple[int, ...]) -> Heads:
    return {(layer, h): HeadSentences(tuple(pool[i] for i in d.indices), d.shares)
            for layer, row in zip(layers, found, strict=True) for h, d in enumerate(row)}


class Analysis:
    """From heads' sentences to a role map, the same way for the reference and for every resampled set of pictures."""

    def __init__(self, args: argparse.Namespace, encode: Encode, encoder: str, pool: list[str] | None):
        self.settings = ConceptSettings(args.min_cluster_size, args.min_samples, args.dimensions,
                                        merge=not args.no_merge)
        self.thresholds = Thresholds(args.low, args.high)
        self.encode, self.encoder = encode, encoder
        on_pool = args.cluster == "pool" or (args.cluster == "auto" and pool is not None and len(pool) < SMALL_POOL)
        if on_pool and pool is None:
            raise ValueError("--cluster pool needs a pool: with --textspan there is none")
        self.pool = pool if on_pool else None

    def concepts(self, heads: Heads, settings: ConceptSettings | None = None) -> Concepts:
        sentences = self.pool or [s for head in heads.values() for s in head.sentences]
        return find_concepts(sentences, self.encode, encoder=self.encoder, settings=settings or self.settings)

    def role_map(self, heads: Heads, concepts: Concepts | None = None, **options) -> RoleMap:
        return entropy_role_map(heads, concepts or self.concepts(heads), thresholds=self.thresholds, **options)

    def sweep(self, heads: Heads) -> list[dict]:
        """Clusters, noise and the label of every head under settings around the chosen one."""
        rows = []
        sentences = self.pool or [s for head in heads.values() for s in head.sentences]
        for settings, labels in sweep(sentences, self.encode, self.settings):
            row = {"min_cluster_size": settings.min_cluster_size, "min_samples": settings.min_samples,
                   "dimensions": settings.dimensions, "clusters": int(labels.max()) + 1,
                   "noise": round(float((labels < 0).mean()), 3), "labels": None}
            if labels.max() >= 1:
                concepts = self.concepts(heads, settings)
                role_map = self.role_map(heads, concepts, model=None) if len(concepts.names) > 1 else None
                row["labels"] = role_map and {f"{x}.{h}": label(role_map.role(x, h)) for x, h in heads}
            rows.append(row)
        return rows


def resampled_maps(analysis: Analysis, moments: textspan.HeadMoments, text: Tensor, pool: list[str],
                   layers: tuple[int, ...], args: argparse.Namespace) -> list[RoleMap]:
    """The whole way again from resampled blocks of pictures; a draw without concepts or pictures keeps no role."""
    maps = []
    weights = textspan.resampled_weights(moments.blocks, draws=args.bootstrap, seed=args.seed)
    for row in progress(weights, "resampled pictures"):
        try:
            found = textspan.describe_heads(moments.total(row), text, n=args.n, rank=args.rank, span=args.span)
            maps.append(analysis.role_map(described(found, pool, layers), model=None))
        except ValueError:
            maps.append(RoleMap.uniform("mixed", layers=layers, heads=moments.sums.shape[2]))
    return maps


# -- the two ways in -------------------------------------------------------------------------------------------------


def from_text(args: argparse.Namespace) -> tuple[RoleMap, dict]:
    """A role map from published sentences: every sentence counts the same, since its variance is not stated."""
    heads = {place: HeadSentences(tuple(found[: args.n]), (1.0 / len(found[: args.n]),) * len(found[: args.n]))
             for place, found in descriptions.read_textspan(args.textspan).items()}
    short = [place for place, head in heads.items() if len(head.sentences) < args.n]
    if short:
        raise ValueError(f"{args.textspan}: head {short[0]} has fewer than n = {args.n} sentences; give a smaller -n")
    last = sorted({layer for layer, _ in heads})[-args.layers :]
    heads = {place: head for place, head in heads.items() if place[0] in last}
    encode, encoder = load_sentence_encoder(args.sbert)
    analysis = Analysis(args, remembering(encode), encoder, None)
    pool = descriptions.unique_sorted(s for head in heads.values() for s in head.sentences)
    parameters = {"n": args.n, "pool": f"sentences of {args.textspan.name}", "pool_hash": descriptions.pool_hash(pool),
                  "weights": "even: the file states no variance", "clustered": "described",
                  **cluster_parameters(analysis)}
    concepts = analysis.concepts(heads)
    role_map = analysis.role_map(heads, concepts, model=None, parameters=parameters)
    return role_map, {"heads": heads, "concepts": concepts, "sweep": analysis.sweep(heads)}


def cluster_parameters(analysis: Analysis) -> dict:
    s = analysis.settings
    return {"min_cluster_size": s.min_cluster_size, "min_samples": s.min_samples, "dimensions": s.dimensions,
            "temperature": s.temperature, "margin": s.margin, "merge": s.merge}


def from_pictures(args: argparse.Namespace, backbone: Backbone, tower: VisionTower) -> tuple[RoleMap, dict]:
    if args.layers < 1 or args.layers > tower.layers:
        raise ValueError(f"--layers must lie between 1 and {tower.layers}, got {args.layers}")
    layers = tuple(range(tower.layers - args.layers, tower.layers))
    pool, origin = sentence_pool(args, backbone)
    encode, encoder = load_sentence_encoder(args.sbert)  # before the pictures: a missing package must not cost an hour
    analysis = Analysis(args, remembering(encode), encoder, pool)
    rank = args.rank = min(args.rank, tower.embed_dim)
    pictures = pictures_of(args, backbone.input_resolution)
    names = "\n".join(pictures.name(i) for i in range(len(pictures)))
    key = json.dumps([backbone.identity.sha256, layers, args.batch_size, args.scenes, args.seed,
                      descriptions.pool_hash([names])])
    moments = textspan.HeadMoments(len(layers), tower.heads, tower.embed_dim, device=args.device)
    prepare = streaming.Preparation(backbone.mean, backbone.std, args.device)
    start = time.perf_counter()
    done = streaming.collect_moments(
        tower, pictures, moments, layers=layers, prepare=prepare, batch_size=args.batch_size,
        state=args.out / STATE, key=key, resume=args.resume, save_every_s=args.save_every, progress=progress)
    print(f"contributions of {len(layers) * tower.heads} heads over {moments.images} pictures "
          f"in {time.perf_counter() - start:.1f} s on {args.device}, "
          f"running sums of {moments.nbytes / 2**30:.2f} GiB")
    if done.skipped:
        print(f"left out {len(done.skipped)} unreadable pictures: {', '.join(done.skipped[:5])}")
    text = text_features(backbone, pool, args.device)
    heads = described(textspan.describe_heads(moments.total(), text, n=args.n, rank=rank, span=args.span), pool, layers)
    concepts = analysis.concepts(heads)
    stability = None
    if args.bootstrap:
        maps = resampled_maps(analysis, moments, text, pool, layers, args)
        stability = kept_share(analysis.role_map(heads, concepts, model=None), maps)
    parameters = {
        "n": args.n, "rank": rank, "span": args.span, "images": moments.images, "image_set": done.image_set_hash(),
        "skipped": len(done.skipped), "batch_size": args.batch_size, "pool": origin, "sentences": len(pool),
        "pool_hash": descriptions.pool_hash(pool), "clustered": "pool" if analysis.pool else "described",
        "bootstrap": args.bootstrap, "seed": args.seed, **cluster_parameters(analysis),
    }
    role_map = analysis.role_map(heads, concepts, model=backbone.identity, parameters=parameters, stability=stability)
    facts = {"heads": heads, "concepts": concepts, "sweep": analysis.sweep(heads), "skipped": done.skipped,
             "pictures": pictures, "prepare": prepare, "text": text, "pool": pool, "digests": set(done.digests)}
    return role_map, facts


# -- what is written -------------------------------------------------------------------------------------------------


def print_table(role_map: RoleMap, concepts: Concepts, heads: Heads, rows: list[dict]) -> None:
    shown = ", ".join(f"{n} ({a}, {int((concepts.labels == k).sum())})"
                      for k, (n, a) in enumerate(zip(concepts.names, concepts.attributes, strict=True)))
    print(f"{len(concepts.names)} concepts over {len(concepts.sentences)} sentences, "
          f"{100 * concepts.noise_share:.0f} % noise ({concepts.backend}): {shown}")
    counts = sorted({row["clusters"] for row in rows})
    print(f"clusters under {len(rows)} settings around the chosen one: {counts[0]} to {counts[-1]}")
    print("layer head  bits  share of max  kept  in sweep  role                    first sentence")
    for (layer, head), found in heads.items():
        info = role_map.role(layer, head)
        name = info.role.value + f" ({info.attribute})" * (info.role.value != "generalization")
        kept = info.evidence.get("kept")
        same = swept_share(rows, role_map, layer, head)
        print(f"{layer:5d} {head:4d} {info.entropy_bits:5.2f} {info.entropy_bits / np.log2(len(concepts.names)):13.3f}"
              f"  {'  - ' if kept is None else f'{kept:4.2f}'}  {same:8.2f}  {name:22s}  {found.sentences[0]}")


def swept_share(rows: list[dict], role_map: RoleMap, layer: int, head: int) -> float:
    """Share of the settings under which the head keeps its label; no concepts counts as lost."""
    own = label(role_map.role(layer, head))
    return sum(bool(r["labels"]) and r["labels"][f"{layer}.{head}"] == own for r in rows) / len(rows)


def write_text(out: Path, heads: Heads) -> None:
    lines = []
    for (layer, head), found in heads.items():
        lines += ["------------------", f"Layer {layer}, Head {head}", "------------------", *found.sentences]
    (out / "sentences.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_report(args: argparse.Namespace, role_map: RoleMap, facts: dict, record: dict, tower: VisionTower | None
                 ) -> None:
    heads, examples = facts["heads"], None
    p = role_map.parameters
    about = (f"{args.backbone or args.textspan}: {p.get('images', 'no')} pictures, {p['n']} sentences a head, "
             f"{p['clusters']} concepts, {100 * p['noise']:.0f} % noise ({p['hdbscan']}, {p['sbert']})")
    if tower is not None and args.report_images:
        row = {sentence: i for i, sentence in enumerate(facts["pool"])}
        first = {place: facts["text"][row[found.sentences[0]]] for place, found in heads.items()}
        examples = report.find_examples(tower, facts["pictures"], facts["prepare"], role_map.layers, first,
                                        limit=args.report_images)
        about += f"; examples are the extremes of {min(args.report_images, p['images'])} pictures"
    data = report.page_data(role_map, heads, facts["concepts"], about=about, sweep=record["sweep"],
                            shared=record["shared"], examples=examples, effects=facts.get("effects"))
    print(f"wrote {report.write_page(args.out / 'report.html', data)}")
    if args.png:
        print("wrote " + ", ".join(map(str, report.write_pngs(args.out, data))))


def run(args: argparse.Namespace) -> None:
    for name in ("n", "rank", "layers", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    args.out.mkdir(parents=True, exist_ok=True)
    backbone = tower = None
    if args.textspan is None:
        backbone = load_backbone(args.backbone, device=args.device)
        tower = vision_tower(backbone.model)
        role_map, facts = from_pictures(args, backbone, tower)
    else:
        role_map, facts = from_text(args)
    path = role_map.save(args.out / "roles.json")
    (args.out / STATE).unlink(missing_ok=True)
    write_text(args.out, facts["heads"])
    print_table(role_map, facts["concepts"], facts["heads"], facts["sweep"])
    record = {"sweep": facts["sweep"], "skipped": facts.get("skipped", []), "agreement": {},
              "heads": [{"layer": x, "head": h, "sentences": list(f.sentences), "explained": list(f.shares)}
                        for (x, h), f in facts["heads"].items()],
              "shared": textspan.shared_descriptions([(p, f.sentences) for p, f in facts["heads"].items()])}
    for name in args.compare:
        record["agreement"][name] = found = agreement(role_map, RoleMap.load(name))
        print(f"agreement with {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()))
    if args.causal and backbone is not None:
        from scripts.heads_by_cause import check_by_cause

        measured, record["causal_agreement"] = check_by_cause(
            backbone, tower, role_map, prepare=facts["prepare"], seen=facts["digests"], count=args.causal,
            seed=args.seed, text_features=lambda texts: text_features(backbone, texts, args.device))
        record["causal"] = causal.as_json(measured)
        facts["effects"] = {place: {name: e.margin_lost_pct for name, e in found.items()}
                            for place, found in measured.heads["total"].items()}
    write_json_atomically(args.out / "heads.json", record)
    if args.report_images or args.png:
        write_report(args, role_map, facts, record, tower)
    print(f"wrote {path} ({role_map.method}, {role_map.content_hash()[:12]}), "
          f"peak memory {peak_memory_mib() / 1024:.2f} GiB")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"analyze_heads.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = (args.out / STATE).is_file()
        print("analyze_heads.py: interrupted; " + ("the same command with --resume goes on from what was saved" if kept
              else "nothing had been saved yet (--save-every)"), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
