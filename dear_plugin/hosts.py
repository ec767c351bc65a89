"""Which names a CLIP has its parts under: OpenAI's by itself, or through a view."""

from typing import Any

from dear_plugin.hf_clip import HfClip

# Views for libraries with names of their own; each says by `fits` whether a model is of its library.
_VIEWS = (HfClip,)


def clip_host(clip: Any) -> Any:
    """The CLIP itself where it has OpenAI's names (`visual`, `encode_image`, ...), else the view that gives it those.

    A view is made anew at each call and holds nothing but the model, so it can never be stale.
    """
    if hasattr(clip, "visual"):
        return clip
    for view in _VIEWS:
        if view.fits(clip):
            return view(clip)
    return clip
