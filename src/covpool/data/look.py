"""One image as ``covpool check`` looks at it."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

from PIL import Image

from covpool.data.decode import BadImageError, decode
from covpool.data.image_set import ImageSet
from covpool.data.signature import EXTENSIONS, FORMAT_OF, format_of

DIGEST_BYTES = 16
SAMPLES = (16, 16)
# Of 255. Grey of 12 bits in files of 16 comes to less, and so does a photograph with the cap on.
DARK = 16


class Look(NamedTuple):
    """What was found.

    Attributes:
        problem: in a word or two, empty if there is none.
        detail: the problem in a sentence.
        content: a digest of the file's bytes; empty if the image cannot be used.
        samples: a digest of the size and of some pixels. Equal pictures have equal ones, and it costs little.
    """

    problem: str
    detail: str
    content: bytes = b""
    samples: bytes = b""


def look(images: ImageSet, i: int) -> Look:
    """Read an image, decode all of it, and compare it with its name."""
    try:
        data = images.read(i)
        picture = decode(data)
    except BadImageError as error:
        return Look(error.reason, str(error))
    except FileNotFoundError:
        return Look("missing", "there is no such file")
    except OSError as error:
        return Look("unreadable", error.strerror or str(error))
    content = hashlib.sha256(data).digest()[:DIGEST_BYTES]
    samples = picture.resize(SAMPLES, Image.Resampling.NEAREST)
    problem = _darkness(picture) or _name_problem(images.name(i), data)
    return Look(*problem, content, _digest(picture, samples))


def pixels(images: ImageSet, i: int) -> bytes:
    """A digest of all pixels of an image that can be used."""
    picture = decode(images.read(i))
    return _digest(picture, picture)


def _digest(picture: Image.Image, part: Image.Image) -> bytes:
    text = f"{picture.width}x{picture.height}:".encode()
    return hashlib.sha256(text + part.tobytes()).digest()[:DIGEST_BYTES]


def _darkness(picture: Image.Image) -> tuple[str, str] | None:
    """Whether there is nothing to see."""
    brightest = max(high for _, high in picture.getextrema())  # type: ignore[misc]
    if brightest >= DARK:
        return None
    return "black", f"its brightest value is {brightest} of 255"


def _name_problem(name: str, data: bytes) -> tuple[str, str]:
    """Whether a file is called as another format is."""
    extension = os.path.splitext(name)[1].lower()
    called, is_really = FORMAT_OF.get(extension), format_of(data)
    if called in (None, is_really) or is_really is None:
        return "", ""
    return "extension", f"it is {is_really}, and should end in {EXTENSIONS[is_really][0]}"
