"""One image in every file format."""

from __future__ import annotations

from tests.data.pictures import encode, photo

FILES = {
    "jpeg": encode(photo(), "JPEG"),
    "progressive": encode(photo(), "JPEG", progressive=True),
    "with a preview": encode(photo(), "JPEG", exif=b"Exif\0\0" + encode(photo((16, 16)), "JPEG")),
    "png": encode(photo(), "PNG"),
    "gif": encode(photo(), "GIF"),
    "two pictures": encode(photo(), "GIF", save_all=True, append_images=[photo().rotate(90)]),
    "webp": encode(photo(), "WEBP"),
    "bmp": encode(photo(), "BMP"),
    "tiff": encode(photo(), "TIFF"),
    "tiff, lzw": encode(photo(), "TIFF", compression="tiff_lzw"),
    "ppm": encode(photo(), "PPM"),
}
