"""The symbols and libraries that a shared library needs, read from its ELF tables: `nm` takes a minute for torch."""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

DYNAMIC, DYNAMIC_SYMBOLS, VERSION_NEEDS, SYMBOL_VERSIONS = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
NEEDED_LIBRARY = 1  # DT_NEEDED
TYPE, OFFSET, SIZE, LINK = 1, 4, 5, 6  # fields of a section's header


class SharedLibrary:
    """The tables of a 64-bit little-endian ELF file."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + number * size) for number in range(count)]
        self.by_type = {section[TYPE]: section for section in self.sections}

    def _text(self, section: tuple, offset: int) -> str:
        """A name of the string table that a section is linked to."""
        start = self.sections[section[LINK]][OFFSET] + offset
        return self.data[start : self.data.find(b"\0", start)].decode()

    def libraries(self) -> list[str]:
        """Return the names of the libraries that it loads."""
        section = self.by_type[DYNAMIC]
        entries = struct.iter_unpack("<QQ", self.data[section[OFFSET] : section[OFFSET] + section[SIZE]])
        return [self._text(section, value) for tag, value in entries if tag == NEEDED_LIBRARY]

    def _versions(self) -> dict[int, str]:
        """Names of symbol versions by their number."""
        if VERSION_NEEDS not in self.by_type:
            return {}
        section = self.by_type[VERSION_NEEDS]
        names, library_at = {}, section[OFFSET]
        while True:
            _, count, _, first, following_library = struct.unpack_from("<HHIII", self.data, library_at)
            version_at = library_at + first
            for _ in range(count):
                _, _, number, name, following = struct.unpack_from("<IHHII", self.data, version_at)
                names[number] = self._text(section, name)
                version_at += following
            if not following_library:
                return names
            library_at += following_library

    def undefined_symbols(self) -> Iterator[tuple[str, str]]:
        """(name, version or "") of each symbol that another library must define."""
        versions, numbers, section = self._versions(), self.by_type.get(SYMBOL_VERSIONS), self.by_type[DYNAMIC_SYMBOLS]
        symbols = struct.iter_unpack("<IBBHQQ", self.data[section[OFFSET] : section[OFFSET] + section[SIZE]])
        for row, (name, _, _, defined_in, _, _) in enumerate(symbols):
            if defined_in == 0 and name:
                number = struct.unpack_from("<H", self.data, numbers[OFFSET] + 2 * row)[0] if numbers else 0
                yield self._text(section, name), versions.get(number, "")


def needs(path: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Libraries that a shared library needs, and its undefined symbols as (name, version)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        library = SharedLibrary(data)
        if DYNAMIC_SYMBOLS not in library.by_type:
            return [], []
        return library.libraries(), list(library.undefined_symbols())
