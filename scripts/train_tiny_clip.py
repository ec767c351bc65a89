"""Train `tiny`, the CLIP in OpenAI's layout that ships with the package, on pictures and sentences it renders itself.

    python scripts/train_tiny_clip.py --work-dir build/tiny                # render, train, export (resumes by itself)
    python scripts/train_tiny_clip.py --work-dir build/tiny --export-only  # write the asset from the last checkpoint

The loss is CLIP's with several positives: sentence j is a positive of picture i when every attribute that it names
holds (the renderer knows), and the target is uniform over the positives. The rate is constant after a warm-up and falls
linearly over the last quarter, so a longer run follows the same path for longer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets.shapes import ATTRIBUTES, IMAGE_SIZE, random_scene, render  # noqa: E402
from datasets.shapes_captions import caption, prompt  # noqa: E402

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's own
GEOMETRY = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": IMAGE_SIZE, "layers": 8, "width": 256, "patch_size": 16, "head_width": 64},
    "text_cfg": {"context_length": 77, "width": 128, "heads": 2, "layers": 4},
}
CAPTIONS_PER_IMAGE = 4
MAX_TOKENS = 32
START, END = 49406, 49407
CHUNK = 2000  # pictures a rendering task; part of the data's identity, since every chunk has its own generator


def _render_chunk(task: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray, list[list[tuple[str, tuple[int, ...]]]]]:
    """Pictures [n, R, R, 3], attribute indices [n, 5] and captions of one chunk."""
    seed, chunk, count = task
    rng = np.random.default_rng([seed, chunk])
    scenes = [random_scene(rng) for _ in range(count)]
    images = np.stack([render(scene, rng) for scene in scenes])
    texts = []
    for scene in scenes:
        made = [caption(scene, rng) for _ in range(CAPTIONS_PER_IMAGE)]
        texts.append([(c.text, c.named) for c in made])
    return images, np.array([scene.indices for scene in scenes], np.int8), texts


def make_pool(path: Path, *, images: int, seed: int, processes: int) -> dict[str, np.ndarray]:
    """Render the training pool once and keep it at `path`; token ids are CLIP's own."""
    if path.exists():
        return dict(np.load(path))
    from open_clip.tokenizer import SimpleTokenizer

    tokenizer, memo = SimpleTokenizer(), {}
    tasks = [(seed, i, min(CHUNK, images - i * CHUNK)) for i in range(math.ceil(images / CHUNK))]
    pictures, attributes, tokens, named = [], [], [], []
    with Pool(processes) as pool:
        for done, (chunk_images, chunk_attributes, texts) in enumerate(pool.imap(_render_chunk, tasks), 1):
            ids = np.zeros((len(texts), CAPTIONS_PER_IMAGE, MAX_TOKENS), np.uint16)
            for i, row in enumerate(texts):
                for j, (text, _) in enumerate(row):
                    if text not in memo:
                        memo[text] = [START, *tokenizer.encode(text), END]
                    ids[i, j, : len(memo[text])] = memo[text]
            pictures.append(chunk_images)
            attributes.append(chunk_attributes)
            tokens.append(ids)
            named.append(np.array([[n for _, n in row] for row in texts], np.int8))
            print(f"\rrendered {min(done * CHUNK, images):,} of {images:,} pictures", end="", file=sys.stderr)
    print(file=sys.stderr)
    data = {"images": np.concatenate(pictures), "attributes": np.concatenate(attributes),
            "tokens": np.concatenate(tokens), "named": np.concatenate(named)}
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **data)
    partial.replace(path)
    return data


def build_model(vocabulary: int, *, seed: int) -> nn.Module:
    """A CLIP of OpenAI's layout; the vision positions start six times larger, so that location is learnt early."""
    from open_clip.model import CLIP

    torch.manual_seed(seed)
    text = {**GEOMETRY["text_cfg"], "vocab_size": vocabulary}
    model = CLIP(GEOMETRY["embed_dim"], GEOMETRY["vision_cfg"], text, quick_gelu=True)
    with torch.no_grad():
        model.visual.positional_embedding.mul_(6.0)
    return model


def encode_text(model: nn.Module, ids: Tensor, end: Tensor) -> Tensor:
    """Text features [C, E] of compact ids [C, L], cut after the longest end token (exact: the mask is causal)."""
    length = int(end.max()) + 1
    x = model.token_embedding(ids[:, :length]) + model.positional_embedding[:length]
    x = model.transformer(x, attn_mask=model.attn_mask[:length, :length])
    return model.ln_final(x)[torch.arange(len(ids)), end] @ model.text_projection


def to_input(pixels: np.ndarray) -> Tensor:
    """uint8 [N, R, R, 3] to normalised float [N, 3, R, R]."""
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255.0)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def multi_positive_loss(image: Tensor, text: Tensor, positive: Tensor, scale: Tensor) -> Tensor:
    """Mean of both directions; `positive` is bool [N, M] and every row and column has at least one True."""
    logits = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    weight = positive.float()
    rows = (F.log_softmax(logits, 1) * weight).sum(1) / weight.sum(1)
    columns = (F.log_softmax(logits, 0) * weight).sum(0) / weight.sum(0)
    return -(rows.mean() + columns.mean()) / 2


def rate(step: int, *, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, constant, linear fall over the last quarter."""
    fall = steps // 4
    return peak * min((step + 1) / warmup, 1.0, max(0.0, (steps - step) / fall))


@torch.no_grad()
def accuracy_per_attribute(model: nn.Module, vocabulary: Vocabulary, held_out: dict) -> dict[str, float]:
    """Zero-shot accuracy in percent of each attribute on held-out pictures."""
    model.eval()
    features = torch.cat([model.visual(to_input(part)) for part in np.array_split(held_out["images"], 8)])
    features = F.normalize(features.float(), dim=-1)
    result = {}
    for k, (key, values) in enumerate(ATTRIBUTES.items()):
        text = F.normalize(vocabulary.encode(model, [prompt(key, value) for value in values]).float(), dim=-1)
        hit = (features @ text.T).argmax(1) == torch.from_numpy(held_out["attributes"][:, k]).long()
        result[key] = round(100.0 * hit.float().mean().item(), 2)
    model.train()
    return result


def export(model: nn.Module, vocabulary: np.ndarray, facts: dict, target: Path) -> None:
    """Write the asset: OpenAI's keys in half precision, the used rows of the token embedding, and its facts."""
    from safetensors.torch import save_file

    from dear_plugin.backbones import pack_tiny

    state = {name: value.detach().clone() for name, value in model.state_dict().items() if name != "attn_mask"}
    rows = state.pop("token_embedding.weight")
    full = torch.zeros(49408, rows.shape[1])
    full[torch.from_numpy(vocabulary.astype(np.int64))] = rows
    packed = pack_tiny({**state, "token_embedding.weight": full}, vocabulary.astype(np.int64).tolist())
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in packed.items()}, target / "tiny_clip.safetensors")
    (target / "tiny_clip.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {target / 'tiny_clip.safetensors'}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="pool, checkpoint, log; a second call continues")
    parser.add_argument("--images", type=int, default=160_000, help="pictures in the training pool")
    parser.add_argument("--steps", type=int, default=3900)
    parser.add_argument("--batch", type=int, default=256, help="pictures a step; each comes with two sentences")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--processes", type=int, default=2, help="for rendering")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1] / "dear_plugin" / "assets")
    parser.add_argument("--export-only", action="store_true")
    return parser.parse_args()


class Vocabulary:
    """The token ids in use and their compact numbering; the model in training holds only these rows."""

    def __init__(self, tokens: np.ndarray) -> None:
        from open_clip.tokenizer import SimpleTokenizer

        self.tokenizer = SimpleTokenizer()
        self.ids = np.unique(np.concatenate([np.unique(tokens), np.array([0, START, END], np.uint16)]))
        self.compact = np.zeros(49408, np.int64)
        self.compact[self.ids] = np.arange(len(self.ids))

    def encode(self, model: nn.Module, texts: list[str]) -> Tensor:
        """Text features [C, E] of sentences whose words are all in use."""
        rows = [[START, *self.tokenizer.encode(text), END] for text in texts]
        ids = np.zeros((len(rows), MAX_TOKENS), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = self.compact[row]
        return encode_text(model, torch.from_numpy(ids), torch.tensor([len(row) - 1 for row in rows]))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def batch_loss(model: nn.Module, data: dict[str, np.ndarray], vocabulary: Vocabulary, step: int,
               args: argparse.Namespace) -> Tensor:
    """Loss of the pictures and sentences of this step: a function of (seed, step), so that runs can resume."""
    epoch, batch = divmod(step, len(data["images"]) // args.batch)
    order = np.random.default_rng([args.seed, epoch]).permutation(len(data["images"]))
    pick = order[batch * args.batch : (batch + 1) * args.batch]
    choices = np.tile(np.arange(CAPTIONS_PER_IMAGE), (len(pick), 1))
    which = np.random.default_rng([args.seed, 7, step]).permuted(choices, axis=1)[:, :2]
    tokens = data["tokens"][pick[:, None], which].reshape(-1, MAX_TOKENS).astype(np.int64)
    named = torch.from_numpy(data["named"][pick[:, None], which].reshape(-1, len(ATTRIBUTES)))
    seen = torch.from_numpy(data["attributes"][pick])
    positive = ((named[None] == seen[:, None]) | (named[None] < 0)).all(-1)
    # the plain attention kernel: on CPUs the fused one is slow backwards at 17 tokens
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        image = model.visual(to_input(data["images"][pick]))
        end = torch.from_numpy((tokens == END).argmax(1))
        text = encode_text(model, torch.from_numpy(vocabulary.compact[tokens]), end)
    return multi_positive_loss(image.float(), text.float(), positive, model.logit_scale.exp())


class Progress:
    """Checkpoint and log in the work folder: what a second call continues from."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.checkpoint, self.log = folder / "checkpoint.pt", folder / "log.jsonl"
        self.model, self.optimizer = model, optimizer
        self.step, self.before, self.began = 0, 0.0, time.perf_counter()
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            self.step, self.before = saved["step"], saved["seconds"]
            print(f"continuing from step {self.step}")

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began

    def save(self, step: int, loss: float, accuracy: dict[str, float]) -> None:
        row = {"step": step, "loss": round(loss, 4), "seconds": round(self.seconds, 1), "accuracy_pct": accuracy}
        print(json.dumps(row), flush=True)
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        partial = self.checkpoint.with_suffix(".partial")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": step, "seconds": self.seconds}, partial)
        partial.replace(self.checkpoint)


def main() -> None:
    args = parse()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    data = make_pool(args.work_dir / "pool.npz", images=args.images, seed=args.seed, processes=args.processes)
    held_images, held_attributes, _ = _render_chunk((args.seed + 1_000_000, 0, 2000))
    held_out = {"images": held_images, "attributes": held_attributes}
    vocabulary = Vocabulary(data["tokens"])
    model = build_model(len(vocabulary.ids), seed=args.seed)
    optimizer = make_optimizer(model, args.lr)
    progress, mean_loss = Progress(args.work_dir, model, optimizer), None
    model.train()
    for step in range(progress.step, 0 if args.export_only else args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps=args.steps, peak=args.lr)
        loss = batch_loss(model, data, vocabulary, step, args)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100.0))
        mean_loss = loss.item() if mean_loss is None else 0.98 * mean_loss + 0.02 * loss.item()
        if (step + 1) % args.evaluate_every == 0 or step + 1 == args.steps:
            progress.save(step + 1, mean_loss, accuracy_per_attribute(model, vocabulary, held_out))
    facts = {
        "name": "tiny", "geometry": GEOMETRY, "quick_gelu": True, "mean": MEAN, "std": STD, "steps": args.steps,
        "seed": args.seed, "pool_images": args.images, "batch": args.batch, "lr": args.lr,
        "train_seconds": round(progress.seconds), "held_out_images": len(held_images),
        "zero_shot_accuracy_pct": accuracy_per_attribute(model, vocabulary, held_out),
        "vocabulary_rows": len(vocabulary.ids),
    }
    export(model, vocabulary.ids, facts, args.output)


if __name__ == "__main__":
    main()
