"""PIL images on the wire (ext 3): `[format, file]`, lossless for every mode.

PNG where it can hold the image, so that any reader can open it; TIFF for most of the other modes; and `RAW`, a form of
our own, for what no file format gives back unchanged. TIFF files and palettes are read back and compared before they are
sent. What travels is the picture: mode, size, pixels, palette, transparency, colour profile, EXIF. A picture loaded
from a JPEG is sent as its pixels and never compressed by JPEG again.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ._msgpack import packb, unpackb
from .encode_errors import CannotPack
from .registry import BuiltIn, instance_of
from .values import kind_of

if TYPE_CHECKING:
    from .registry import Buffer

__all__ = ["CODECS"]

RAW = "RAW"
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_PNG_SURE = frozenset({"1", "L", "LA", "RGB", "RGBA"})  # PNG gives these back as they were, always
_TIFF_MODES = frozenset({"F", "I", "I;16", "I;16B", "CMYK", "LAB", "YCbCr", "P", "PA"})
_BYTES_A_PIXEL = {
    "L": 1, "P": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "YCbCr": 3, "LAB": 3, "HSV": 3, "I": 4, "F": 4, "LA": 2, "PA": 2,
    "RGBX": 4, "RGBa": 4, "La": 2, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2,
}  # fmt: skip
MAX_SURE_PROFILE_BYTES = 1 << 16
"""A larger colour profile is read back and compared: Pillow reads no profiles of a MiB."""
MAX_EMPTY_SIDE = 1 << 16
"""Pixels of the longer side of an image without pixels: Pillow allocates for each row even so."""
_MAGIC = {b"\x89PNG": ("PNG",), b"II*\0": ("TIFF",), b"MM\0*": ("TIFF",)}
_FORMATS = (
    "PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "DIB", "PCX", "SGI", "ICNS",
    "DDS", "QOI", "IM", "MSP", "SPIDER", "XBM", "BLP",
)  # fmt: skip
"""Other formats that peers may send: those that Pillow reads by itself. Not EPS, which it hands to another program."""


def _encode(value: Any, pil: Any) -> list[Buffer]:
    """The body of an image, in pieces."""
    if getattr(value, "is_animated", False):
        raise CannotPack(value, "it has several frames", "send value.copy() for this one, or a list of copies of all")
    limit = pil.MAX_IMAGE_PIXELS
    if limit is not None and value.width * value.height > limit:
        raise CannotPack(
            value,
            f"it has more than the {limit} pixels that Pillow decodes without complaint",
            "send numpy.asarray(value), or raise PIL.Image.MAX_IMAGE_PIXELS on both sides",
        )
    image = value.copy()  # a plain image, loaded, whose info can be replaced
    image.info = _kept_info(value)
    form, file = _file(image)
    head = b"\x92" + packb(form) + b"\xc6" + len(file).to_bytes(4)
    return [head, file]


def _kept_info(image: Any) -> dict[str, Any]:
    info: dict[str, Any] = {key: image.info[key] for key in ("icc_profile", "exif") if _is_bytes(image.info.get(key))}
    transparency = image.info.get("transparency")
    if _is_bytes(transparency) or type(transparency) is int or _is_colour(transparency):
        info["transparency"] = transparency
    return info


def _is_colour(value: Any) -> bool:
    return kind_of(value) is tuple and len(value) == 3 and all(kind_of(part) is int for part in value)


def _is_bytes(value: Any) -> bool:
    return kind_of(value) is bytes and len(value) > 0


def _file(image: Any) -> tuple[str, Buffer]:
    """Format name and file: the first form that gives the image back."""
    mode = image.mode
    info = image.info
    if image.width and image.height:
        if mode in _PNG_MODES:
            exif = {"exif": info["exif"]} if "exif" in info else {}
            # The wire is no archive: level 1 is several times faster than Pillow's default.
            file = _save(image, "PNG", compress_level=1, **exif)
            sure = (
                mode in _PNG_SURE
                and "transparency" not in info
                and len(info.get("icc_profile", b"")) < MAX_SURE_PROFILE_BYTES
            )
            if file is not None and (sure or _same(image, file)):
                return "PNG", file
        if mode in _TIFF_MODES and not info.keys() - {"icc_profile"}:
            file = _save(image, "TIFF")
            if file is not None and _same(image, file):
                return "TIFF", file
    return RAW, _raw(image)


def _save(image: Any, form: str, **options: Any) -> Buffer | None:
    file = io.BytesIO()
    try:
        image.save(file, format=form, **options)
    except (OSError, ValueError, TypeError, KeyError):  # this form does not hold it
        return None
    return file.getbuffer()


def _same(image: Any, file: Buffer) -> bool:
    try:
        return _picture(_open(file)) == _picture(image)
    except Exception:
        return False


def _picture(image: Any) -> tuple[Any, ...]:
    """What must come back. A palette with alpha may be stored in another way, but must show the same colours."""
    shown: Any = image.info.get("transparency")
    if image.mode in ("P", "PA"):
        shown = image.convert("RGBA").tobytes()
    return image.mode, image.size, image.tobytes(), image.getpalette(), shown


def _raw(image: Any) -> bytes:
    palette_mode = None
    palette = None
    if image.mode in ("P", "PA") and image.getpalette():
        palette_mode = image.im.getpalettemode()
        palette = bytes(image.getpalette(palette_mode))
    return packb([image.mode, list(image.size), palette_mode, palette, image.info, image.tobytes()])


def _decode(body: Buffer) -> Any:
    """The image of a body: loaded, and of the plain class `PIL.Image.Image`."""
    from PIL import Image

    form, file = unpackb(body)
    if type(file) is not bytes:
        raise ValueError("the body is not [format, file]")
    if form == RAW:
        return _open_raw(file)
    opened = _open(file)
    if opened.format == "TIFF":  # the rest of its info is about the file
        opened.info = {key: opened.info[key] for key in ("icc_profile",) if key in opened.info}
    assert isinstance(opened, Image.Image)
    return opened.copy()


def _open(file: Buffer) -> Any:
    """The file, opened and loaded. Raises ValueError for a bomb, and whatever Pillow raises."""
    from PIL import Image

    formats: tuple[str, ...] | None = _MAGIC.get(bytes(file[:4]))
    if formats is None:
        Image.init()
        formats = tuple(form for form in _FORMATS if form in Image.OPEN)
    image = Image.open(io.BytesIO(file), formats=formats)
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and image.width * image.height > limit:
        raise ValueError(
            f"an image of {image.width} x {image.height} pixels is over PIL.Image.MAX_IMAGE_PIXELS ({limit})"
        )
    image.load()
    return image


def _open_raw(file: bytes) -> Any:
    from PIL import Image

    mode, (width, height), palette_mode, palette, info, pixels = unpackb(file)
    if type(width) is not int or type(height) is not int or width < 0 or height < 0:
        raise ValueError("the size of an image is two numbers of pixels")
    if mode == "1":
        expected = (width + 7) // 8 * height
    else:
        expected = width * height * _BYTES_A_PIXEL[mode]
    if len(pixels) != expected or (not expected and max(width, height) > MAX_EMPTY_SIDE):
        raise ValueError(f"mode and size ask for {expected} bytes, {len(pixels)} came")
    if expected:
        image = Image.frombytes(mode, (width, height), pixels)
    else:
        image = Image.new(mode, (width, height))
    if palette:
        image.putpalette(palette, palette_mode)
        image.load()
    image.info = {key: tuple(value) if kind_of(value) is list else value for key, value in info.items()}
    return image


CODECS = (BuiltIn(3, "PIL.Image", "PIL.Image", instance_of("Image"), _encode, _decode),)
