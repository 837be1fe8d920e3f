"""From the bytes of a file to a picture: RGB, upright, whole.

Formats are JPEG (and MPO, as cameras call a JPEG with a second picture behind it), PNG, WebP, GIF (its first
picture), BMP, TIFF (its first page) and PPM (which traffic signs come in). Pillow is given the one format
that the first bytes tell, so that the dozens of rarely used readers it has never see a file.

No setting of Pillow is changed and nothing is shared but a cache, so threads and forked processes may decode
at will. Warnings of Pillow about odd metadata are left to the filters of whoever runs this, since changing
those is not safe with threads.
"""

from __future__ import annotations

import io

# TIFF and WebP are imported here, or Pillow would import all its readers to find them.
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL import TiffImagePlugin as _TiffImagePlugin  # noqa: F401
from PIL import WebPImagePlugin as _WebPImagePlugin  # noqa: F401

from covpool.data.bad_image import BadImageError
from covpool.data.colour import to_rgb
from covpool.data.signature import EXTENSIONS, format_of
from covpool.data.strict import make_strict

__all__ = ["BadImageError", "decode"]

# A longer image, brought to a usual shorter side, would take gigabytes.
MAX_PROPORTION = 100
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes) -> Image.Image:
    """The picture in a file.

    Args:
        data: all bytes of the file.

    Returns:
        RGB as a person sees it, see :func:`covpool.data.colour.to_rgb`; turned upright where the file says
        how the camera was held; loaded, and without metadata.

    Raises:
        BadImageError: if there is none, or not all of it, or it has more than ``PIL.Image.MAX_IMAGE_PIXELS``,
            or is a line.
    """
    image_format = _format(data)
    stream = _Stream(data)
    try:
        image = _load(stream, image_format)
        rgb = _upright(to_rgb(image), image)
    except (BadImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError("too large", _one_line(error)) from error
    except Exception as error:  # Pillow's readers raise whatever the parsing of nonsense leads to
        if stream.is_exhausted or _is_short_webp(data):
            raise _truncated(image_format) from error
        raise BadImageError("unreadable", f"the {image_format} is broken: {_one_line(error)}") from error
    if max(rgb.size) > MAX_PROPORTION * min(rgb.size):
        raise BadImageError("too large", f"it is {rgb.width} by {rgb.height}, a line")
    rgb.info = {}
    return rgb


def _format(data: bytes) -> str:
    image_format = format_of(data)
    if image_format in EXTENSIONS:
        return image_format
    if not data:
        raise BadImageError("unreadable", "the file is empty")
    if image_format is None:
        raise BadImageError("unreadable", f"it is no known kind of image: it begins with {data[:8]!r}")
    raise BadImageError("format", f"it is {image_format}; what is read is {', '.join(EXTENSIONS)}")


def _load(stream: _Stream, image_format: str) -> Image.Image:
    image = Image.open(stream, formats=[image_format])
    stream.is_in_blocks, stream.is_exhausted = True, False  # a look for more than a header is all right
    # Pillow warns of more pixels than its limit, and raises only at twice as many.
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise BadImageError("too large", f"it has {pixels:,} pixels, and Pillow's limit is {limit:,}")
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        make_strict(image)
    image.load()
    # Pillow may have been told to fill up what is missing.
    if stream.is_exhausted:
        raise _truncated(image_format)
    return image


def _upright(rgb: Image.Image, image: Image.Image) -> Image.Image:
    try:
        # A TIFF has none left: Pillow turns it while loading, and forgets about it.
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken metadata of a good picture
        method = None
    return rgb if method is None else rgb.transpose(method)


class _Stream(io.BytesIO):
    """Bytes that remember whether somebody wanted more than there are, which no whole image makes them.

    Attributes:
        is_in_blocks: whether what is wanted is the next block, of which the last is short; before, in the
            header, it is what must be there.
        is_exhausted: what it remembers.
    """

    is_in_blocks = False
    is_exhausted = False

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if len(data) < (size or 0):
            self.is_exhausted |= not data or not self.is_in_blocks
        return data


def _truncated(image_format: str) -> BadImageError:
    return BadImageError("truncated", f"the end of the {image_format} is missing")


def _is_short_webp(data: bytes) -> bool:
    """Whether a WebP has fewer bytes than it says; it is decoded in one go, so its stream tells nothing."""
    return data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little")


def _one_line(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # it tells the address of the stream
        return "its header makes no sense"
    return " ".join(str(error).split()) or type(error).__name__
