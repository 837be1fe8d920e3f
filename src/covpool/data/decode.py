"""Decode image files exactly, or raise BadImageError with the reason."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import threading
from itertools import repeat

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
# A scan of a progressive JPEG takes a few bytes, and a pass over all pixels. Encoders write about ten.
MAX_SCANS = 100
START_OF_SCAN, END_OF_IMAGE = b"\xff\xda", b"\xd9"
_MARKER = re.compile(rb"\xff+([^\0\xff\xd0-\xd7])")
_WITHOUT_LENGTH = (b"\x01", b"\xd8")
_IN_PIECES = "its header or its pixels are in too many small pieces"
# Tags of the offsets and the sizes of strips and tiles.
TIFF_PARTS = (273, 279), (324, 325)
# Pillow reads a header in small pieces, each of which takes time: bytes, chunks, segments or blocks.
MAX_HEADER_READS = 10_000
# Pixels may be in pieces too, such as the chunks of a PNG. They have at least this many bytes on average.
PIECE_BYTES = 1024
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
            ``PIL.Image.MAX_IMAGE_PIXELS`` pixels, is over 100 times as long as wide, or is made to decode
            slowly: a JPEG of over 100 scans, a TIFF whose parts overlap, a header in over 10,000 pieces.
    """
    image_format = _format(data)
    stream = _Stream(data)
    try:
        with _STRICT:
            image = _load(data, stream, image_format)
            rgb = _upright(to_rgb(image), image)
    except (BadImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError("too large", _one_line(error)) from error
    except Exception as error:  # Pillow's readers raise many kinds for invalid data
        if stream.is_exhausted or _is_short_webp(data):
            raise _truncated(image_format) from error
        raise BadImageError("unreadable", f"the {image_format} is broken: {_one_line(error)}") from error
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


def _load(data: bytes, stream: _Stream, image_format: str) -> Image.Image:
    image = Image.open(stream, formats=[image_format])
    first_scan = stream.tell()
    stream.is_in_blocks, stream.is_exhausted = True, False  # the header may be read past its end
    stream.reads_left = repeat(True, MAX_HEADER_READS + len(data) // PIECE_BYTES)
    # Pillow warns of more pixels than its limit, and raises only at twice as many.
    pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise BadImageError("too large", f"it has {pixels:,} pixels, and Pillow's limit is {limit:,}")
    if max(image.size) > MAX_PROPORTION * min(image.size):
        raise BadImageError("too large", f"it is {image.width} by {image.height}, a line")
    if image_format == "JPEG":
        _check_scans(data, image, first_scan)
    if image_format == "TIFF":
        _check_parts(image, len(data))
    image.load()
    if stream.is_exhausted:
        raise _truncated(image_format)
    return image


def _check_scans(data: bytes, image: Image.Image, place: int) -> None:
    """Raise if a JPEG has too many scans; Pillow read it up to the data of the first one."""
    # A scan of all components is the only one, unless the JPEG is progressive.
    layers: int = getattr(image, "layers", 0)
    only = START_OF_SCAN + bytes([0, 6 + 2 * layers, layers])
    if "progressive" not in image.info and data.startswith(only, place - 8 - 2 * layers):
        return
    if data.count(START_OF_SCAN) <= MAX_SCANS:
        return
    scans, place = 0, 2
    for _ in range(MAX_HEADER_READS):
        match = _MARKER.search(data, place)
        if match is None or match[1] == END_OF_IMAGE:  # a video or a second image may follow
            return
        marker, place = match[1], match.end()
        scans += marker == START_OF_SCAN[1:]
        if scans > MAX_SCANS:
            raise BadImageError("too large", f"it has more than {MAX_SCANS} scans, and decodes slowly")
        if marker not in _WITHOUT_LENGTH:
            place += max(int.from_bytes(data[place : place + 2], "big"), 2)
    raise BadImageError("too large", _IN_PIECES)


def _check_parts(image: Image.Image, size: int) -> None:
    """Raise if the strips or tiles of a TIFF overlap: one could be decoded for each row of pixels."""
    tags = getattr(image, "tag_v2", {})
    for starts, lengths in TIFF_PARTS:
        parts = tags.get(lengths, ())
        if sum(parts) > size:
            if any(start + length > size for start, length in zip(tags.get(starts, ()), parts, strict=False)):
                raise _truncated("TIFF")
            raise BadImageError("too large", "its strips or tiles have more bytes than the file")


def _upright(rgb: Image.Image, image: Image.Image) -> Image.Image:
    try:
        # A TIFF has no orientation here: Pillow rotates it while loading and removes the tag.
        method = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # broken metadata in a valid image
        method = None
    return rgb if method is None else rgb.transpose(method)


_READ = io.BytesIO.read  # faster than super()


class _Stream(io.BytesIO):
    """A stream that records reads past its end, which a complete image never causes.

    Attributes:
        is_in_blocks: whether reads are for blocks of pixels, of which the last may be short. A short read in
            the header always means that the file is truncated.
        is_exhausted: whether a read went past the end.
        reads_left: how many more reads there may be.
    """

    is_in_blocks = False
    is_exhausted = False

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = repeat(True, MAX_HEADER_READS)  # faster than a number

    def read(self, size: int | None = -1, /) -> bytes:
        if not next(self.reads_left, False):
            raise BadImageError("too large", _IN_PIECES)
        data = _READ(self, size)
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
