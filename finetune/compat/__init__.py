"""Compat: all patches, overrides and private calls of other libraries, one module per library.

Each module lists every such name (`PRIVATE_NAMES`) and has the functions that use it. `tests/compat` fails when a library has
renamed one or no longer looks it up. Libraries are imported when a function is called.
"""
