"""Every configuration that open_clip lists: wrapped or refused by name, decided by what its configuration says."""

import contextlib
import logging

import pytest
import torch

from dear_plugin.towers import text_tower, vision_tower


def _build(name: str):
    """The model without weights (meta device); None where its text tower needs a download."""
    import open_clip

    config = open_clip.get_model_config(name)
    text = config["text_cfg"]
    if "hf_model_name" in text:
        return config, None
    text.pop("tokenizer_kwargs", None)
    kind = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
    kind = open_clip.CoCa if "multimodal_cfg" in config else kind
    logging.disable(logging.CRITICAL)
    try:
        with torch.device("meta"):
            return config, kind(**config)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_listed_model_is_accepted_or_refused_as_its_config_says():
    import open_clip

    counts = {"accepted": 0, "refused": 0, "needs a download": 0}
    for name in open_clip.list_models():
        config, model = _build(name)
        if model is None:
            counts["needs a download"] += 1
            continue
        vision = config["vision_cfg"]
        plain = not (
            vision.get("timm_model_name") or isinstance(vision.get("layers"), list) or "multimodal_cfg" in config
            or vision.get("pool_type", "tok") != "tok" or vision.get("attentional_pool")
        )
        with contextlib.nullcontext() if plain else pytest.raises(ValueError, match="the (vision|text) tower"):
            vision_tower(model)
            text_tower(model)
        counts["accepted" if plain else "refused"] += 1
    print(counts)
    assert counts["accepted"] >= 39 and counts["refused"] >= 90
