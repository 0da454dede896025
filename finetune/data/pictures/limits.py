"""Limits of one picture."""

#: Pixels of one picture: 50-megapixel photos pass, and one decoded picture takes 256 MB at most (4 bytes a pixel).
MAX_PIXELS = 64_000_000
#: Bytes of one file; a picture of MAX_PIXELS without compression has 192 MB.
MAX_FILE_BYTES = 256 * 2**20
#: Shortest side. Image processors take an axis of 1 or 3 for the colour channels.
MIN_SIDE = 4
#: Longer side over shorter side, from which a picture is refused: Qwen2-VL's resize raises above it.
MAX_ASPECT = 200
