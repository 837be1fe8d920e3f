"""Errors of decoding that are raised whatever Pillow was told.

``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``, which some libraries set for the whole process, makes Pillow pass
over errors and return what it has of a picture. It is not ours to change, since others may rely on it. So
where it is set, pictures are decoded by way of a decoder that raises before Pillow gets to see the error. It
is in Pillow's table of decoders under a name of its own.
"""

from __future__ import annotations

from typing import Any

from PIL import Image, ImageFile

NAME = "covpool_strict"
# It decodes a whole file at once, and raises in any case.
STRICT_ALREADY = ("libtiff",)


def make_strict(image: ImageFile.ImageFile) -> None:
    """Have an image that is not loaded yet raise when its loading fails."""
    image.tile = [
        tile if tile[0] in STRICT_ALREADY else tile._replace(codec_name=NAME, args=(tile[0], tile[3]))
        for tile in image.tile
    ]


class StrictDecoder:
    """Another decoder of Pillow, whose errors are exceptions.

    Args:
        mode: of the image.
        name: of the other decoder.
        args: for it.
        extra: for it, too.
    """

    def __init__(self, mode: str, name: str, args: Any, *extra: Any) -> None:
        self._decoder = Image._getdecoder(mode, name, args, extra)
        self.pulls_fd = self._decoder.pulls_fd
        self.setimage, self.cleanup = self._decoder.setimage, self._decoder.cleanup
        self.setfd = getattr(self._decoder, "setfd", None)

    def decode(self, data: bytes) -> tuple[int, int]:
        """As the other one."""
        consumed, error = self._decoder.decode(data)
        if error < 0:
            raise OSError(f"decoder error {error}")
        return consumed, error


Image.register_decoder(NAME, StrictDecoder)  # type: ignore[arg-type]  # it has all that Pillow uses
