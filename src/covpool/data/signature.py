"""Formats of images by the first bytes of a file, and the names that files of a format have."""

from __future__ import annotations

import re

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
FORMAT_OF = {extension: name for name, extensions in EXTENSIONS.items() for extension in extensions}

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
    "HEIC": rb"....ftyp(hei|hev|mif1|msf1)",
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
