"""The contract matrix: library x geometry x contract, each cell measured or refused; run it to print the table.

    python tests/matrix.py                            the table, with the rows marked slow left out
    python tests/matrix.py --slow --write docs/backbones.md     all rows, written between the marks of that file
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from matrix_models import REFUSED, Refused, from_file, full_size  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from toys import ALL, EXACT, GEOMETRIES, Geometry, stock_image, stock_text, toy_clip, toy_ids, wrapped  # noqa: E402

from dear_plugin import RoleMap, load_adapter, save_adapter, wrap_clip_with_roles  # noqa: E402
from dear_plugin.roles import HeadInfo, HeadRole  # noqa: E402

MARKS = ("<!-- matrix: python tests/matrix.py --slow --write docs/backbones.md -->", "<!-- end of matrix -->")
# What each contract must give: an upper bound for a difference, or the exact words.
EXPECTED = {
    "no tokens": 0.0, "isolation": 1e-5, "routing": "texture", "save/load": 0.0, "compile": 1e-5, "DDP": 2e-5,
}


@dataclass(frozen=True)
class Row:
    """One CLIP of the matrix. `expected` overrides EXPECTED; `slow` names columns that only the slow tests run."""

    library: str
    geometry: str
    build: Callable[[], nn.Module]
    shape: Geometry
    vocabulary: int = 64
    expected: tuple[tuple[str, float | str], ...] = ()
    slow: tuple[str, ...] = ()
    only: tuple[str, ...] = tuple(EXPECTED)  # the columns that are measured at all; the reason stands in `left_out`
    left_out: str = ""

    @property
    def name(self) -> str:
        return f"{self.library} {self.geometry}"

    def bound(self, column: str) -> float | str:
        return {**EXPECTED, **dict(self.expected)}[column]

    def images(self, n: int = 2) -> Tensor:
        size = self.shape.resolution
        return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))

    def ids(self) -> Tensor:
        if self.vocabulary == 64:
            return toy_ids()
        ids = torch.zeros(3, 77, dtype=torch.long)  # OpenAI's own ids: start, words, end
        ids[:, 0], ids[:, 1], ids[0, 2], ids[1, 3], ids[2, 2] = 49406, 1125, 49407, 49407, 320
        ids[1, 2], ids[2, 3] = 736, 49407
        return ids

    def cells(self) -> list[tuple[int, int]]:
        layers = range(self.shape.first_layer, self.shape.layers)
        return [(layer, head) for layer in layers for head in range(self.shape.heads)]

    def wrap(self, roles: RoleMap | None = None, clip: nn.Module | None = None, **options: object):
        """The CLIP with large seeded tokens; by default a third of the heads of each kind."""
        kinds = [HeadInfo(HeadRole.ATTRIBUTE, "color"), HeadInfo(HeadRole.MIXED), HeadInfo(HeadRole.GENERALIZATION)]
        roles = roles or RoleMap.from_heads({cell: kinds[i % 3] for i, cell in enumerate(self.cells())})
        return wrapped("", roles, clip=self.build() if clip is None else clip, **options)


# -- columns ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def no_tokens(row: Row) -> float:
    """Largest difference from the library's own features."""
    clip, images, ids = row.build(), row.images(), row.ids()
    image, text = stock_image(clip, images), stock_text(clip, ids)
    role_clip = row.wrap(clip=clip, attributes=(), text_tokens=0)
    with row.wrap(clip=clip).disabled() as off:
        parts = [role_clip.encode_image(images) - image, role_clip.encode_text(ids) - text,
                 off.encode_image(images) - image, off.encode_text(ids) - text]
    return max(float(part.abs().max()) for part in parts)


def isolation(row: Row) -> float:
    """Largest difference of the CLS feature (unit length) where no head lets a token through, 1 if a gradient leaks."""
    layers = range(row.shape.first_layer, row.shape.layers)
    role_clip = row.wrap(RoleMap.uniform("generalization", layers=layers, heads=row.shape.heads))
    features = role_clip.image_features(row.images(), frozen=True)
    features.cls.square().sum().backward()
    leaks = any(p.grad is not None and bool(p.grad.any()) for p in role_clip.adapter.parameters())
    return 1.0 if leaks else _apart(features.cls, features.frozen_cls)


def routing(row: Row) -> str:
    """Attributes whose token the gradient of CLS reaches through one open head; "CLIP" if a frozen weight got one."""
    infos = {cell: HeadInfo(HeadRole.GENERALIZATION) for cell in row.cells()}
    infos[row.cells()[0]] = HeadInfo(HeadRole.ATTRIBUTE, "texture")
    role_clip = row.wrap(RoleMap.from_heads(infos), token_mixing=False, text_tokens=0)
    role_clip.image_features(row.images()).cls.square().sum().backward()
    moved = role_clip.adapter.tokens.latents.grad.abs().sum(1) > 0
    frozen = ["CLIP"] if any(p.grad is not None for p in role_clip.clip.parameters()) else []
    return ", ".join([name for name, at in zip(role_clip.config.attributes, moved, strict=True) if at] + frozen)


@torch.no_grad()
def saved(row: Row) -> float:
    """Largest difference of logits after saving and loading into another wrapper of a model built anew."""
    one, other = row.wrap(), row.wrap()
    for parameter in one.adapter.parameters():
        parameter.add_(torch.randn_like(parameter))
    before, other_before = _logits(one, row), _logits(other, row)
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(one, folder)
        load_adapter(other, folder)
    if torch.equal(before, other_before):
        raise RuntimeError("the two adapters agree before loading: nothing is tested")
    return float((_logits(other, row) - before).abs().max())


def compiled(row: Row, backend: str = "aot_eager") -> float:
    """Largest difference (unit length) of the compiled image path, one graph without breaks, from the plain one."""
    torch._dynamo.reset()
    role_clip = row.wrap()
    role_clip.clip.requires_grad_(False)
    with torch.no_grad():
        fast = torch.compile(role_clip.encode_image, backend=backend, fullgraph=True)(row.images())
        return _apart(fast, role_clip.encode_image(row.images()))


def distributed(rows: Iterable[Row]) -> dict[str, float]:
    """Row name -> largest difference of gradients, relative to the largest one: two gloo processes against one."""
    with tempfile.TemporaryDirectory() as folder:
        shared = ["--rendezvous", f"{folder}/meet", "--output", f"{folder}/out.json", "--rows", *(r.name for r in rows)]
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *shared]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        errors = [worker.communicate(timeout=600)[1] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError("\n".join(errors)[-3000:])
        return json.loads(Path(folder, "out.json").read_text())


class _Loss(nn.Module):
    """A training step's loss as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, role_clip: nn.Module, ids: Tensor):
        super().__init__()
        self.role_clip, self.ids = role_clip, ids

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        image, text = self.role_clip.image_features(images), self.role_clip.encode_text(self.ids)
        return F.cross_entropy(self.role_clip.class_logits(image, text), labels)


def _work(rank: int, rendezvous: str, names: list[str], output: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    found = {}
    for row in [row for row in ROWS if row.name in names]:
        images, labels = row.images(4), torch.tensor([0, 1, 2, 0])
        role_clip = row.wrap()
        role_clip.clip.requires_grad_(False)
        model = nn.parallel.DistributedDataParallel(_Loss(role_clip, row.ids()))
        half = slice(0, 2) if rank == 0 else slice(2, 4)
        model(images[half], labels[half]).backward()
        gradients = [parameter.grad for parameter in role_clip.trainable_parameters()]
        if rank == 0:
            single = row.wrap()
            _Loss(single, row.ids())(images, labels).backward()
            wanted = [parameter.grad for parameter in single.trainable_parameters()]
            found[row.name] = max(
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, wanted, strict=True))
    if rank == 0:
        Path(output).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _apart(a: Tensor, b: Tensor) -> float:
    return float((F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).abs().max().detach())


def _logits(role_clip: nn.Module, row: Row) -> Tensor:
    return role_clip.class_logits(role_clip.image_features(row.images()), role_clip.encode_text(row.ids()))


COLUMNS: dict[str, Callable[[Row], float | str]] = {
    "no tokens": no_tokens, "isolation": isolation, "routing": routing, "save/load": saved, "compile": compiled,
    "DDP": lambda row: distributed([row])[row.name],
}

# -- rows -------------------------------------------------------------------------------------------------------

_LIBRARIES = {"openai": "OpenAI clip", "open_clip": "open_clip", "custom_text": "open_clip", "hf": "transformers"}
_ONE_OF_A_KIND = ("openai", "open_clip-narrow-heads", "open_clip-custom-text", "hf")
_LONG = ("compile", "DDP")


def _describe(name: str, g: Geometry) -> str:
    parts = [f"{g.layers} layers, {g.heads} heads of {g.width // g.heads}", "QuickGELU" if g.quick_gelu else "GELU"]
    if g.library == "custom_text":
        parts.append("CustomTextCLIP")
    if g.layer_scale:
        parts.append("layer scale, own attention class")
    if g.text_layers != g.layers and name in GEOMETRIES:
        parts.append(f"{g.text_layers} text layers")
    if g.library == "hf":
        parts.append("end token at the largest id" if g.eos == 2 else "end token by id")
    return f"{name.split(' ')[0] + ', ' if name in EXACT else ''}{', '.join(parts)}"


def _rows() -> list[Row]:
    rows = [
        Row(_LIBRARIES[g.library], _describe(name, g), lambda name=name: toy_clip(name), g,
            slow=() if name in _ONE_OF_A_KIND else _LONG)
        for name, g in ALL.items()
    ]
    for kind in ("state dict", "TorchScript archive"):
        for name in ("ViT-B/32", "ViT-B/16", "ViT-L/14", "ViT-L/14@336px"):
            g = EXACT[f"{name} openai"]
            rows.append(Row(f"file ({kind})", f"{name}, {g.layers} layers", from_file(g, kind), g, vocabulary=49408,
                            slow=_LONG if name == "ViT-B/16" else tuple(EXPECTED)))
    for name in ("ViT-B/32", "ViT-B/16", "ViT-L/14", "ViT-L/14@336px"):
        for kind in ("state dict", "TorchScript archive"):
            build, g = full_size(name, kind)
            whole = (name, kind) == ("ViT-B/16", "state dict")
            rows.append(Row(f"file ({kind})", f"{name}, full size", build, g, vocabulary=49408, slow=tuple(EXPECTED),
                            only=tuple(EXPECTED) if whole else tuple(EXPECTED)[:4], left_out="not run"))
    return rows


ROWS = _rows()


def table(rows: Iterable[Row], refused: Iterable[Refused], *, slow: bool) -> str:
    """The matrix as Markdown; a cell that this call does not run says so."""
    rows = [row for row in rows if slow or set(row.slow) != set(EXPECTED)]
    grouped = distributed([row for row in rows if "DDP" in row.only and (slow or "DDP" not in row.slow)])
    lines = [f"| library | geometry | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for row in rows:
        cells = []
        for column, measure in COLUMNS.items():
            if column not in row.only:
                cells.append(row.left_out)
            elif column in row.slow and not slow:
                cells.append("not run")
            else:
                found = grouped[row.name] if column == "DDP" else measure(row)
                cells.append(_shown(found, row.bound(column)))
        lines.append(f"| {row.library} | {row.geometry} | {' | '.join(cells)} |")
        print(lines[-1], file=sys.stderr, flush=True)
    lines += ["", "| refused | with the words |", "|---|---|"]
    for case in refused:
        try:
            wrap_clip_with_roles(case.build(), RoleMap.uniform("mixed", layers=[1, 2], heads=2), latent_width=8)
        except (ValueError, RuntimeError) as error:
            lines.append(f"| {case.name} | {str(error).split(chr(10))[0]} |")
        else:
            lines.append(f"| {case.name} | **accepted, which is wrong** |")
    return "\n".join(lines)


def holds(found: float | str, bound: float | str) -> bool:
    """Whether a cell is as the row expects it."""
    return found == bound if isinstance(bound, str) else found <= bound


def _shown(found: float | str, bound: float | str) -> str:
    text = found if isinstance(found, str) else "0" if found == 0 else f"{found:.0e}"
    return text if holds(found, bound) else f"**{text}** (wanted {bound})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="also the full-size models and all compiled rows")
    parser.add_argument("--write", type=Path, help="a Markdown file with the marks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _work(arguments.rank, arguments.rendezvous, arguments.rows, arguments.output)
        return
    torch.set_num_threads(1)
    made = table(ROWS, REFUSED, slow=arguments.slow)
    if arguments.write is None:
        print(made)
        return
    before, after = arguments.write.read_text(encoding="utf-8").split(MARKS[0])
    after = after.split(MARKS[1])[1]
    arguments.write.write_text(f"{before}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
