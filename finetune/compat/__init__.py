"""All patches of other libraries, one module per library."""

# Each module lists its private names in `PRIVATE_NAMES`: `tests/compat` fails when a library has renamed a name or no longer
# looks it up. Each function imports its library when called.
