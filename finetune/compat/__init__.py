"""All patches of other libraries, one module per library. `PRIVATE_NAMES` lists every private name that this project uses.

`tests/compat` fails when a library has renamed one or no longer looks it up. Libraries are imported when a function is called.
"""
