"""Decode image files exactly, or raise BadImageError with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import threading

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError, features

# Imported explicitly: otherwise Pillow imports all its readers to find these.
from PIL import TiffImagePlugin as _TiffImagePlugin  # noqa: F401
from PIL import WebPImagePlugin as _WebPImagePlugin  # noqa: F401

from covpool.errors import BadImageError

# Formats that are read, with their file extensions. Messages suggest the first extension.
EXTENSIONS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "BMP": (".bmp", ".dib"),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
# Formats that need an optional library.
if features.check("avif"):
    EXTENSIONS["AVIF"] = (".avif",)
HEIF = (".heic", ".heif", ".hif")
with contextlib.suppress(ModuleNotFoundError):
    import pillow_heif

    pillow_heif.register_heif_opener()
    EXTENSIONS["HEIF"] = HEIF
FORMAT_OF = {extension: name for name, extensions in EXTENSIONS.items() for extension in extensions}

# Raw camera formats. Most start like a TIFF; read as one, they would give their preview.
RAW = (
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dng", ".iiq", ".nef", ".nrw"),
    *(".orf", ".pef", ".raf", ".raw", ".rw2", ".sr2", ".srw", ".x3f"),
)
CONVERT = "convert them to JPEG or PNG"
# Advice for images that are not read, by file extension.
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

# First bytes of each format. Formats that are not read are listed for error messages.
SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WEBP": rb"RIFF....WEBP",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{12}[\x0c-\x7c]\0\0\0",  # two letters are too few, so check the second header's length too
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
    """Return the format of a file by its first 512 bytes; ``None`` if it is unknown.

    Example:
        >>> format_of(b"GIF89a..."), format_of(b"<html><body>404</body></html>"), format_of(b"hello")
        ('GIF', 'a web page', None)
    """
    beginning = data[:BEGINNING]
    return next((name for name, pattern in _COMPILED.items() if pattern.match(beginning)), None)


class _StrictLoading:
    """A context in which Pillow raises for damaged files, even if another library disabled that.

    ``ImageFile.LOAD_TRUNCATED_IMAGES`` is restored when the last thread leaves.
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
    """Convert an image to RGB.

    Transparent pixels are composited over white. :meth:`PIL.Image.Image.convert` would show their hidden
    colors, which are often black or leftovers.

    A color profile other than sRGB is applied: without it, Adobe RGB looks pale and CMYK oversaturated. A
    profile that is broken or belongs to another color space is ignored, as in image viewers.
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
    """Return the image without transparency, in L, RGB, CMYK or LAB, and its alpha channel."""
    if image.mode.startswith("I"):
        return _grey_layers(image)
    if image.mode not in KINDS:
        raise BadImageError("format", f"its pixels are {image.mode}, which has no defined black and white")
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if image.mode in ("RGB", "CMYK", "LAB") and alpha is None:
        return image, None
    base = "L" if image.mode in ("1", "L", "LA") else "RGB"
    # Through an alpha channel: Pillow cannot convert a transparent color or palette directly.
    return (image if alpha is None else image.convert(f"{base}A")).convert(base), alpha


def _grey_layers(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Return the upper 8 bits of 16-bit gray, as Pillow does for 16-bit color."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise BadImageError("format", "its pixels have 32 bits, which have no defined black and white")
    # Pillow leaves two things of a TIFF to the caller: 12 bits are not scaled to 16, and 0 may be white.
    tags = getattr(image, "tag_v2", {})
    bits = 12 if tags.get(TIFF_BITS) == (12,) else 16
    grey = (values >> (bits - 8)).astype(np.uint8)
    opaque = Image.fromarray(~grey if tags.get(TIFF_PHOTOMETRIC) == TIFF_WHITE_IS_ZERO else grey)
    transparent = image.info.get("transparency")
    if transparent is None:
        return opaque, None
    return opaque, Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8))


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image | None:
    """Convert an image to sRGB; return ``None`` if it is sRGB already or the profile is unusable."""
    try:
        transform = _to_srgb(profile, image.mode)
        return None if transform is None else transform.apply(image)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


# A data set has few profiles. Without its pixel cache, a transform can be shared by threads.
@functools.lru_cache(maxsize=8)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if (source.profile.profile_description or "").startswith("sRGB"):
        return None
    return ImageCms.buildTransform(
        source, ImageCms.createProfile("sRGB"), mode, "RGB", flags=ImageCms.Flags.NOCACHE
    )


# Resizing the shorter side of a longer image to the usual size would take gigabytes.
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
    """Decode an image file.

    Args:
        data: all bytes of the file.

    Returns:
        The loaded image in RGB (see :func:`covpool.data.decode.to_rgb`), rotated according to its EXIF
        orientation, without metadata.

    Raises:
        BadImageError: if the file is not an image, is truncated or damaged, has more than
            ``PIL.Image.MAX_IMAGE_PIXELS`` pixels, or is over 100 times as long as wide.
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
    except Exception as error:  # Pillow's readers raise many kinds for invalid data
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
        raise BadImageError("unreadable", f"it is not a known image format: it starts with {data[:8]!r}")
    remedy = f": {NOT_READ['.heic']}" if image_format == "HEIF" else ""
    raise BadImageError("format", f"it is {image_format}; covpool reads {', '.join(EXTENSIONS)}{remedy}")


def _load(stream: _Stream, image_format: str) -> Image.Image:
    image = Image.open(stream, formats=[image_format])
    stream.is_in_blocks, stream.is_exhausted = True, False  # the header may be read past its end
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
        # A TIFF has no orientation here: Pillow rotates it while loading and removes the tag.
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken metadata in a valid image
        method = None
    return rgb if method is None else rgb.transpose(method)


class _Stream(io.BytesIO):
    """A stream that records reads past its end, which a complete image never causes.

    Attributes:
        is_in_blocks: whether reads are for blocks of pixels, of which the last may be short. A short read in
            the header always means that the file is truncated.
        is_exhausted: whether a read went past the end.
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
    """Return whether a WebP is shorter than its header states; its decoder reads everything at once."""
    return data.startswith(b"RIFF") and len(data) < 8 + int.from_bytes(data[4:8], "little")


def _one_line(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # its text holds a memory address
        return "its header is invalid"
    return " ".join(str(error).split()) or type(error).__name__
