"""Decode image files exactly, or raise BadImageError with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import threading

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError, features

# Imported here, or Pillow would import all its readers to find them.
from PIL import TiffImagePlugin as _TiffImagePlugin  # noqa: F401
from PIL import WebPImagePlugin as _WebPImagePlugin  # noqa: F401

from covpool.errors import BadImageError

# What is read, and by which names its files go. The first is what to rename a file to.
EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
# With libraries that not every machine has.
if features.check("avif"):
    EXTENSIONS["AVIF"] = (".avif",)
HEIF = (".heic", ".heif", ".hif")
with contextlib.suppress(ModuleNotFoundError):
    import pillow_heif

    pillow_heif.register_heif_opener()
    EXTENSIONS["HEIF"] = HEIF
FORMAT_OF = {extension: name for name, extensions in EXTENSIONS.items() for extension in extensions}

# Raw formats of cameras. Most begin as TIFF does, and called so would give their preview.
RAW = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".iiq", ".nef", ".nrw"),
    *(".orf", ".pef", ".raf", ".raw", ".rw2", ".sr2", ".srw", ".x3f"),
)
CONVERT = "convert them to JPEG or PNG"
# What to do with pictures that are not read, by the extension of their names.
NOT_READ = {
    extension: advice
    for extensions, advice in (
        (HEIF, "pip install 'covpool[heif]' to read them"),
        (RAW, "raw files of a camera: export them as JPEG or TIFF"),
        ((".avif", ".eps", ".ico", ".j2k", ".jp2", ".jxl", ".psd", ".svg", ".tga"), CONVERT),
    )
    for extension in extensions
    if extension not in FORMAT_OF
}

# How files begin. Formats that are not read are here for the sake of messages.
SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WEBP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{12}[\x0c-\x7c]\0\0\0",  # the length of the second header: two letters alone are too little
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "PPM": rb"P[1-6][\s#]",
    "AVIF": rb"....ftypavi[fs]",
    "HEIF": rb"....ftyp(hei|hev|mif1|msf1)",
    "JPEG XL": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "JPEG 2000": rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "Photoshop": rb"8BPS",
    "PDF": rb"%PDF",
    "ICO": rb"\0\0\x01\0",
    "SVG": rb"(?i)\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg",
    "a web page": rb"(?i)\s*(<!doctype html|<html)",
    "a Git LFS pointer": rb"version https://git-lfs",
}
BEGINNING = 512
_COMPILED = {name: re.compile(pattern, re.DOTALL) for name, pattern in SIGNATURES.items()}


def format_of(data: bytes) -> str | None:
    """The format of a file by its first bytes, of which 512 are enough; ``None`` if it is not known.

    Example:
        >>> format_of(b"GIF89a..."), format_of(b"<html><body>404</body></html>"), format_of(b"hello")
        ('GIF', 'a web page', None)
    """
    beginning = data[:BEGINNING]
    return next((name for name, pattern in _COMPILED.items() if pattern.match(beginning)), None)


class _StrictLoading:
    """While in use by any thread, Pillow raises for damaged files, whatever another library told it.

    ``ImageFile.LOAD_TRUNCATED_IMAGES`` has its former value again after the last thread leaves.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = ImageFile.LOAD_TRUNCATED_IMAGES
                ImageFile.LOAD_TRUNCATED_IMAGES = False
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_STRICT = _StrictLoading()

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
        RGB as a person sees it, see :func:`covpool.data.decode.to_rgb`; turned upright where the file says
        how the camera was held; loaded, and without metadata.

    Raises:
        BadImageError: if there is none, or not all of it, or it has more than ``PIL.Image.MAX_IMAGE_PIXELS``,
            or is a line.
    """
    image_format = _format(data)
    stream = _Stream(data)
    try:
        with _STRICT:
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
    remedy = f": {NOT_READ['.heic']}" if image_format == "HEIF" else ""
    raise BadImageError("format", f"it is {image_format}; what is read is {', '.join(EXTENSIONS)}{remedy}")


def _load(stream: _Stream, image_format: str) -> Image.Image:
    image = Image.open(stream, formats=[image_format])
    stream.is_in_blocks, stream.is_exhausted = True, False  # a look for more than a header is all right
    # Pillow warns of more pixels than its limit, and raises only at twice as many.
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise BadImageError("too large", f"it has {pixels:,} pixels, and Pillow's limit is {limit:,}")
    image.load()
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
