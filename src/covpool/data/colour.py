"""Any kind of picture as the RGB that a person sees, 8 bits each."""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageCms

from covpool.data.bad_image import BadImageError

WHITE = (255, 255, 255)
KINDS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB")
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_WHITE_IS_ZERO = 258, 262, 0


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB.

    What is transparent is laid over white, as on a page. Under it, files keep black or leftovers that nobody
    sees, and which :meth:`PIL.Image.Image.convert` would show.

    A colour profile other than sRGB is applied: without that, Adobe RGB looks pale, and CMYK garish. A
    profile that is broken or is for another kind of picture is ignored, as viewers do.
    """
    profile = image.info.get("icc_profile")
    opaque, alpha = _layers(image)
    rgb = _in_srgb(opaque, profile) if profile else None
    if rgb is None:
        rgb = opaque if opaque.mode == "RGB" else opaque.convert("RGB")
    if alpha is None:
        return rgb
    page = Image.new("RGB", rgb.size, WHITE)
    page.paste(rgb, mask=alpha)
    return page


def _layers(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """The picture as if nothing were transparent, in L, RGB, CMYK or LAB, and how opaque each pixel is."""
    if image.mode.startswith("I"):
        return _grey_layers(image)
    if image.mode not in KINDS:
        raise BadImageError("format", f"its pixels are {image.mode}, which has no agreed black and white")
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if image.mode in ("RGB", "CMYK", "LAB") and alpha is None:
        return image, None
    base = "L" if image.mode in ("1", "L", "LA") else "RGB"
    # By way of an alpha channel: from a transparent colour or palette, Pillow finds no straight way.
    return (image if alpha is None else image.convert(f"{base}A")).convert(base), alpha


def _grey_layers(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Of grey in 16 bits, the upper 8, as Pillow takes them of 16-bit colours."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise BadImageError("format", "its pixels have 32 bits, which have no agreed black and white")
    # What Pillow leaves to do of a TIFF: 12 bits are in 16 as they are, and 0 may be white.
    tags = getattr(image, "tag_v2", {})
    bits = 12 if tags.get(TIFF_BITS) == (12,) else 16
    grey = (values >> (bits - 8)).astype(np.uint8)
    opaque = Image.fromarray(~grey if tags.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO else grey)
    transparent = image.info.get("transparency")
    if transparent is None:
        return opaque, None
    return opaque, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """The picture's colours in sRGB; ``None`` where it has these already, or the profile is of no use."""
    try:
        transform = _to_srgb(profile, image.mode)
        return None if transform is None else transform.apply(image)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


# An album has one profile or a few. A transform without a cache of pixels can be shared by threads.
@functools.lru_cache(maxsize=8)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if (source.profile.profile_description or "").startswith("sRGB"):
        return None
    return ImageCms.buildTransform(
        source, ImageCms.createProfile("sRGB"), mode, "RGB", flags=ImageCms.Flags.NOCACHE
    )
