"""PIL images (ext 3)."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import msgpack
import pytest
from helpers import each_row
from PIL import Image
from wire_cases import roundtrip, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError

MODES = [mode for mode in Image.MODES if mode != "P"] + ["P"]
PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}


def noise(mode: str, size: tuple[int, int] = (7, 5)) -> Image.Image:
    """An image of random pixels; palettes have all their 256 colours."""
    rng = random.Random(mode)
    image = Image.new(mode, size)
    image = Image.frombytes(mode, size, rng.randbytes(len(image.tobytes())))
    if mode in ("P", "PA"):
        image.putpalette(rng.randbytes(768))
    return image


def form(image: Image.Image) -> str:
    """The name of the form in which an image travels."""
    ext = msgpack.unpackb(wire.pack(image))
    return str(msgpack.unpackb(ext.data)[0])


def opened(format: str, mode: str = "RGB", **options: Any) -> Image.Image:
    file = io.BytesIO()
    noise(mode, (32, 24)).save(file, format, **options)
    file.seek(0)
    return Image.open(file)


@each_row("size", [(7, 5), (1, 1), (64, 33), (0, 0), (0, 3), (4, 0)])
@each_row("mode", MODES)
def test_R58_every_mode_comes_back_pixel_for_pixel(mode: str, size: tuple[int, int]) -> None:
    image = noise(mode, size) if all(size) else Image.new(mode, size)
    back = roundtrip([image])[0]
    assert same(image, back)
    assert type(back) is Image.Image
    if all(size):
        assert (form(image) == "PNG") == (mode in PNG)


@each_row("mode", ["F", "I", "I;16B", "CMYK", "LAB", "YCbCr"])
def test_modes_that_a_file_format_holds_can_be_opened_by_any_reader(mode: str) -> None:
    ext = msgpack.unpackb(wire.pack(noise(mode)))
    name, file = msgpack.unpackb(ext.data)
    assert name == "TIFF"
    assert Image.open(io.BytesIO(file)).mode == mode


def test_in_memory_images_compare_equal() -> None:
    for mode in ("1", "L", "RGB", "RGBA", "F", "CMYK", "HSV"):
        assert roundtrip(noise(mode)) == noise(mode)


@each_row("options", [{"quality": 30}, {"quality": 95, "subsampling": 0}, {"progressive": True}])
@each_row("mode", ["RGB", "L", "CMYK"])
def test_R58_a_loaded_jpeg_is_never_compressed_again(mode: str, options: Any) -> None:
    image = opened("JPEG", mode, **options)
    for _ in range(3):
        back = roundtrip(image)
        assert same(image, back)
        image = back
    assert form(opened("JPEG", mode)) == ("PNG" if mode in PNG else "TIFF")


@each_row("format, mode", [("WEBP", "RGB"), ("GIF", "P"), ("BMP", "RGB"), ("TIFF", "F"), ("PPM", "L")])
def test_images_loaded_from_files(format: str, mode: str) -> None:
    image = opened(format, mode)
    assert same(image, roundtrip(image))


def test_an_image_changed_after_loading_travels_as_it_is_now() -> None:
    image = opened("JPEG")
    image.putalpha(100)
    assert same(image, roundtrip(image))
    image = opened("JPEG")
    image.paste((1, 2, 3), (0, 0, 9, 9))
    assert roundtrip(image).getpixel((3, 3)) == (1, 2, 3)


def test_a_tiff_compressed_with_loss_is_not_compressed_so_again() -> None:
    image = opened("JPEG", "CMYK")
    image.info["compression"] = "jpeg"  # what Pillow would use again for a TIFF loaded so
    assert same(image, roundtrip(image))


@each_row("palette", [(b"", None), (bytes(range(9)), "RGB"), (bytes(768), "RGB"), (bytes(range(40)), "RGBA")], ids=str)
@each_row("transparency", [None, 0, 2, 200, b"\x00\x10\xff", b"\xff\x00", bytes(256)])
@each_row("pixels", [bytes(4), bytes([0, 1, 2, 1]), bytes([0, 9, 255, 3])])
@each_row("mode", ["P", "PA"])
def test_palettes_and_transparency(mode: str, palette: Any, transparency: Any, pixels: bytes) -> None:
    image = Image.frombytes(mode, (2, 2), pixels if mode == "P" else pixels * 2)
    if palette[0]:
        image.putpalette(*palette)
    if transparency is not None:
        image.info["transparency"] = transparency
    back = roundtrip(image)
    assert same(image, back)
    if mode == "P":
        assert same(image.convert("RGBA"), back.convert("RGBA"))


def test_quantized_images() -> None:
    for source in (noise("RGB", (20, 20)), noise("RGBA", (20, 20))):
        for colours in (2, 16, 200):
            image = source.quantize(colours, method=Image.Quantize.FASTOCTREE)
            assert same(image, roundtrip(image))
            assert form(image) == "PNG"


@each_row("mode, colour", [("L", 7), ("RGB", (1, 2, 3)), ("1", 255), ("I;16", 300)])
def test_transparent_colours(mode: str, colour: Any) -> None:
    image = noise(mode)
    image.info["transparency"] = colour
    back = roundtrip(image)
    assert same(image, back)
    assert back.info == {"transparency": colour}


def test_profile_and_exif_travel_and_other_notes_do_not() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation
    image = opened("JPEG", exif=exif.tobytes(), icc_profile=b"profile" * 50, dpi=(300, 300))
    back = roundtrip(image)
    assert back.getexif()[0x0112] == 6
    assert back.info["icc_profile"] == b"profile" * 50
    image = noise("L")
    image.info.update(dpi=(300, 300), note=object(), icc_profile="no bytes", exif=[], transparency="none")
    assert roundtrip(image) == noise("L")
    image = noise("F")
    image.info.update(icc_profile=b"profile", exif=exif.tobytes())
    assert roundtrip(image).getexif()[0x0112] == 6


def test_notes_that_a_file_would_not_give_back() -> None:
    image = noise("RGB")
    image.info["icc_profile"] = random.Random(3).randbytes(2 << 20)
    assert roundtrip(image) == image
    image = noise("L")
    image.info["transparency"] = (1, 2, 3)  # of another mode: Pillow cannot write it
    assert roundtrip(image) == image


def test_what_cannot_be_sent_whole_is_refused_with_the_fix() -> None:
    file = io.BytesIO()
    noise("L", (8, 8)).save(file, "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 3)])
    image = Image.open(file)
    with pytest.raises(EncodeError) as caught:
        wire.pack({"i": image})
    assert str(caught.value) == (
        'cannot pack a value of type PIL.GifImagePlugin.GifImageFile at $["i"]: it has several frames; '
        "send value.copy() for this one, or a list of copies of all"
    )
    image.seek(1)
    assert same(image.copy(), roundtrip(image.copy()))
    closed = noise("L")
    closed.close()
    with pytest.raises(EncodeError, match="its encoding failed"):
        wire.pack(closed)


def test_the_pixel_limit_of_pillow_holds_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = wire.pack(noise("L", (40, 40)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1599)
    with pytest.raises(WireError, match=r"code 3 \(PIL\.Image"):
        wire.unpack(blob)
    with pytest.raises(
        EncodeError, match=r"send numpy\.asarray\(value\), or raise PIL\.Image\.MAX_IMAGE_PIXELS on both"
    ):
        wire.pack(noise("L", (40, 40)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1600)
    assert same(wire.unpack(blob), noise("L", (40, 40)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert same(wire.unpack(blob), noise("L", (40, 40)))


# --- hostile bodies --------------------------------------------------------------------------------------------------


def blob_of(*body: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(3, msgpack.packb(list(body)))))


def png(width: int, height: int) -> bytes:
    """A small PNG file that unfolds to a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def raw(mode: Any = "L", size: Any = (2, 2), palette_mode: Any = None, palette: Any = None, info: Any = None) -> bytes:
    return bytes(msgpack.packb([mode, size, palette_mode, palette, {} if info is None else info, b"abcd"]))


@each_row(
    "body",
    [
        [],
        ["PNG"],
        ["PNG", "text"],
        ["PNG", b""],
        ["PNG", b"\x89PNG\r\n\x1a\n"],
        ["PNG", b"no image"],
        ["PNG", png(50_000, 50_000)],
        ["PNG", png(12_000, 12_000)],
        ["PNG", png(3, 3)[:45]],
        ["EPS", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"],
        ["RAW", b""],
        ["RAW", b"\xc0"],
        ["RAW", raw(size=(3, 2))],
        ["RAW", raw(size=(-2, -2))],
        ["RAW", raw(size=(2**31, 2**31))],
        ["RAW", raw(size=(0, 2**31 - 1))],
        ["RAW", raw(size=(2.0, 2))],
        ["RAW", raw(size=4)],
        ["RAW", raw(mode="no mode")],
        ["RAW", raw(mode=["L"])],
        ["RAW", raw(mode="P", palette_mode="no mode", palette=b"abc")],
        ["RAW", raw(info=7)],
        ["RAW", b"\x96\xa1L\x92\x00\xce\x7f\xff\xff\xff\xc0\xc0\x80\xc4\x00"],
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_false_bodies_are_wire_errors(body: list[Any]) -> None:
    with pytest.raises(WireError, match=r"cannot unpack the ext value of code 3 \(PIL\.Image, \d+ bytes\): "):
        wire.unpack(blob_of(*body))


def test_any_damage_to_a_file_is_a_wire_error_or_an_image() -> None:
    rng = random.Random(1)
    for image in (noise("RGB"), noise("F"), noise("HSV"), noise("PA")):
        blob = wire.pack(image)
        for _ in range(150):
            damaged = bytearray(blob)
            for _ in range(rng.randint(1, 3)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                wire.unpack(damaged)
            except WireError:
                continue
