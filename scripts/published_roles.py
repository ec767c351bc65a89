"""Write the shipped role maps that come from published facts about heads, not from weights at hand.

    python scripts/published_roles.py --labels clip_head_labels.json --textspan ViT-B-16_laion2b_..._descriptions.txt

The labels give method `published-labels` (OpenAI's ViT-B/16, B/32, L/14), the sentences give a `concept-entropy` map of
open_clip's ViT-B-16 laion2b_s34b_b88k. No sentence is kept: numbers and concept names only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dear_plugin.analysis.entropy import agreement  # noqa: E402
from dear_plugin.analysis.published import published_role_map  # noqa: E402
from dear_plugin.roles import SHIPPED_MAPS, RoleMap  # noqa: E402

LABEL_SOURCE = ("labels of IntelLabs/multimodal_cognitive_ai, CLIP-InterpreT (src/topic_seg_labels.py, commit "
                "d1f2acc39b68), mapped to roles by "
                "dear_plugin/analysis/published.py; not an entropy map, not checked on the weights")
TEXT_SOURCE = ("TEXTSPAN output of wj210/CLIP_LTC, commit e370442fcaa9daec457a33e8ca6986c184e6323c; its image set is "
               "not stated")
_B16 = {"layers": 12, "heads": 12, "width": 768, "patch_size": 16, "resolution": 224, "embed_dim": 512}
# Shipped name -> (key of the labels file, name of the backbone, what can be checked without a hash of the weights).
OPENAI = {
    "openai_vit_b16": ("ViT-B-16/openai", "ViT-B/16", {**_B16, "activation": "quick_gelu"}),
    "openai_vit_b32": ("ViT-B-32/openai", "ViT-B/32", {**_B16, "patch_size": 32, "activation": "quick_gelu"}),
    "openai_vit_l14": ("ViT-L-14/openai", "ViT-L/14", {
        "layers": 24, "heads": 16, "width": 1024, "patch_size": 14, "resolution": 224, "embed_dim": 768,
        "activation": "quick_gelu"}),
}
LAION = "open_clip_vit_b16_laion2b"


def from_labels(path: Path, folder: Path) -> dict[str, RoleMap]:
    published = json.loads(path.read_text(encoding="utf-8"))
    maps = {}
    for name, (key, backbone, geometry) in OPENAI.items():
        labels = {int(layer): row for layer, row in published[key].items()}
        parameters = {"source": LABEL_SOURCE, "backbone": backbone, "intended": geometry}
        maps[name] = published_role_map(labels, parameters=parameters)
        maps[name].save(folder / f"{name}.json")
    key = "ViT-B-16/laion2b_s34b_b88k"
    maps[key] = published_role_map({int(x): row for x, row in published[key].items()}, parameters={"intended": {}})
    return maps


def from_sentences(path: Path, folder: Path) -> RoleMap:
    from scripts.analyze_heads import from_text, parse

    role_map, _ = from_text(parse(["--textspan", str(path), "--out", str(folder)]))
    intended = {**_B16, "activation": "gelu"}
    parameters = {**role_map.parameters, "source": TEXT_SOURCE, "backbone": "open_clip:ViT-B-16/laion2b_s34b_b88k",
                  "intended": intended}
    role_map = replace(role_map, parameters=parameters)
    role_map.save(folder / f"{LAION}.json")
    return role_map


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True)
    parser.add_argument("--textspan", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=SHIPPED_MAPS)
    args = parser.parse_args()
    maps = from_labels(args.labels, args.out)
    found = agreement(from_sentences(args.textspan, args.out), maps["ViT-B-16/laion2b_s34b_b88k"])
    print("laion2b, sentences against labels: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
