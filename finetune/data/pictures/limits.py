"""Limits of images."""

#: Pixels of one image: 50-megapixel photos pass, and one decoded image takes 256 MB at most (4 bytes a pixel).
MAX_PIXELS = 64_000_000
#: Bytes of one file; an image of MAX_PIXELS without compression has 192 MB.
MAX_FILE_BYTES = 256 * 2**20
#: Shortest side. Image processors take an axis of 1 or 3 for the colour channels.
MIN_SIDE = 4
#: Longer side over shorter side, from which an image is refused: Qwen2-VL's resize raises above it.
MAX_ASPECT = 200
#: Images of one message in a chat, and of one request to `serve`.
MAX_PICTURES = 16


def size_problem(width: int, height: int) -> str | None:
    """Return why an image's size is refused, as a sentence after the image's name."""
    if width * height > MAX_PIXELS:
        return f"has {width:,} x {height:,} pixels, {too_many_pixels(width * height)}"
    if min(width, height) < MIN_SIDE:
        return f"has {width} x {height} pixels; the shorter side must have {MIN_SIDE}"
    if max(width, height) >= MAX_ASPECT * min(width, height):
        return f"has {width:,} x {height:,} pixels, a side {MAX_ASPECT} times as long as the other or more"
    return None


def too_many_pixels(pixels: int | None) -> str:
    """Describe a number of pixels above the limit; None: unknown."""
    count = f"{pixels / 1e6:,.0f} megapixels" if pixels else "too many pixels"
    return f"{count}; the limit is {MAX_PIXELS // 10**6} megapixels"
